"""A client that asks for the statistics at a steady rate, from a process of its own, and whom it asks: us, or others.

It costs the machine as little as one can: compiled code that sends and reads bytes over a kept connection. A client on
another machine would cost this one nothing at all.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from bench.poll_loop import COUNT, ENDED, REFUSED, STOP, TARGET, TOO_LARGE, poll_loop
from bench.report import median_interval, spread, verdict

NOBODY, OWN, OTHER = ARMS = (-1, 0, 1)
"""Who is polled: nobody, the service with the engine, or another process."""
STATS = "/admin/v1/stats"
START_S = 120.0
PATIENCE_S = 10
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Poller:
    """A poller that runs. Threads and processes may ask it at any time."""

    _words: NDArray[np.int64]

    def ask(self, arm: int) -> None:
        """Poll this one from now on."""
        self._words[TARGET] = arm

    @property
    def polls(self) -> int:
        """Answers so far."""
        return int(self._words[COUNT])


@contextmanager
def polling(urls: Sequence[str], rate: float) -> Iterator[Poller]:
    """A process that polls `urls`, which are those of `OWN` and `OTHER`; at first nobody."""
    context = multiprocessing.get_context("spawn")
    shared = context.RawArray(ctypes.c_int64, 3)
    words = np.frombuffer(shared, np.int64)
    poller = Poller(words)
    poller.ask(NOBODY)
    process = context.Process(target=_poll, args=(urls, rate, shared))
    process.start()
    try:
        poller.ask(OTHER)
        deadline_s = time.monotonic() + START_S
        while poller.polls < rate:
            if not process.is_alive() or time.monotonic() > deadline_s:
                raise SystemExit("the poller does not get up to speed")
            time.sleep(0.05)
        poller.ask(NOBODY)
        yield poller
    finally:
        words[STOP] = 1
        process.join()


@contextmanager
def another_service(folder: Path) -> Iterator[str]:
    """The URL of a service without an engine, in a process of its own."""
    env = os.environ | {"KVFERRY_ENGINE": "none", "KVFERRY_PORT": "0", "KVFERRY_STATE_DIR": str(folder)}
    command = [sys.executable, "-m", "app.cli", "serve"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as other:
        try:
            for line in other.stderr or ():
                if (match := re.search(r"serving on (http://\S+):", line)) is not None:
                    yield match[1]
                    return
            raise SystemExit("the other service did not start")
        finally:
            other.terminate()


def show_polled(columns: Mapping[str, Sequence[Mapping[int, float]]], goal: float) -> None:
    """Tables of times, in seconds a step, by what was timed, round and arm."""
    print(f"\n| ms a step, median (min-max) | not polled | polled | other polled |\n| {'--- | ' * 4}".rstrip())
    for name, times in columns.items():
        cells = [spread([1e3 * one[arm] for one in times]) for arm in (NOBODY, OWN, OTHER)]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\n| | | ratio | 95% interval | goal {goal:.3f} |\n| --- | --- | ---: | --- | --- |")
    for name, times in columns.items():
        for what, base in (("polled / not polled", NOBODY), ("polled / other polled", OTHER)):
            ratios = [one[OWN] / one[base] for one in times]
            low, high = median_interval(ratios)
            interval = f"{low:.3f} to {high:.3f}"
            print(f"| {name} | {what} | {statistics.median(ratios):.3f} | {interval} | {verdict(ratios, goal)} |")


def _poll(urls: Sequence[str], rate: float, shared: ctypes.Array[ctypes.c_int64]) -> None:
    words = np.frombuffer(shared, np.int64)
    sockets = list(map(_connect, urls))
    asked = list(map(_request, urls))
    lengths = np.array(list(map(len, asked)))
    requests = np.zeros((len(asked), lengths.max()), np.uint8)
    for row, request in zip(requests, asked, strict=True):
        row[: len(request)] = np.frombuffer(request, np.uint8)
    answer = np.zeros(MAX_ANSWER_BYTES, np.uint8)
    while True:
        descriptors = np.array([one.fileno() for one in sockets], np.int32)
        why, size = poll_loop()(words, descriptors, requests, lengths, round(1e9 / rate), answer)
        if words[STOP]:
            return
        if why == ENDED and not size:
            # Not polled for longer than the server keeps a connection.
            for index, one in enumerate(sockets):
                one.close()
                sockets[index] = _connect(urls[index])
        else:
            what = {ENDED: "broke off", REFUSED: "is not 200", TOO_LARGE: "is too large"}[why]
            raise SystemExit(f"an answer of {' or '.join(urls)} {what}: {answer[: min(size, 200)].tobytes()!r}")


def _connect(url: str) -> socket.socket:
    """A blocking socket that gives up after a while."""
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname or "127.0.0.1", place.port or 80), timeout=PATIENCE_S)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE_S, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _request(url: str) -> bytes:
    place = urlsplit(url)
    return f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
