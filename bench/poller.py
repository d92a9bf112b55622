"""A client that asks for the statistics at a steady rate, from a process of its own, and whom it asks: us, or others.

It costs the machine as little as one can that is written in Python: a kept connection, and bytes that are sent and
read. A client on another machine would cost this one nothing at all.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

from bench.report import median_interval, spread, verdict

NOBODY, OWN, OTHER = ARMS = (-1, 0, 1)
"""Who is polled: nobody, the service with the engine, or another process."""
STATS = "/admin/v1/stats"
START_S = 120.0


@dataclass(frozen=True)
class Poller:
    """A poller that runs. Threads and processes may ask it at any time."""

    _target: Synchronized[int]
    _count: Synchronized[int]

    def ask(self, arm: int) -> None:
        """Poll this one from now on."""
        self._target.value = arm

    @property
    def polls(self) -> int:
        """Answers so far."""
        return self._count.value


@contextmanager
def polling(urls: Sequence[str], rate: float) -> Iterator[Poller]:
    """A process that polls `urls`, which are those of `OWN` and `OTHER`; at first nobody."""
    context = multiprocessing.get_context("spawn")
    poller = Poller(context.Value("i", NOBODY), context.Value("i", 0))
    stop = context.Event()
    process = context.Process(target=_poll, args=(urls, rate, poller._target, stop, poller._count))
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
        stop.set()
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


def _poll(urls: Sequence[str], rate: float, target: Synchronized[int], stop: Event, count: Synchronized[int]) -> None:
    asks = [_connect(url) for url in urls]
    due_s = time.monotonic()
    while not stop.is_set():
        due_s = max(due_s + 1 / rate, time.monotonic() - 1.0)
        time.sleep(max(due_s - time.monotonic(), 0.0))
        if (arm := target.value) != NOBODY:
            asks[arm]()
            count.value += 1


def _connect(url: str) -> Callable[[], None]:
    """What asks once, over a connection that is opened again when the server has closed it."""
    place = urlsplit(url)
    where = (place.hostname or "127.0.0.1", place.port or 80)
    request = f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
    connection: list[socket.socket] = []

    def ask() -> None:
        if not connection:
            connection.append(socket.create_connection(where, timeout=10))
            connection[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection[0].sendall(request)
        answer = connection[0].recv(65536)
        if not answer:
            # Not polled for longer than the server keeps a connection.
            connection.pop().close()
            return ask()
        while (head := re.match(rb"(?is)HTTP/1.1 200 .*?\r\ncontent-length: *(\d+).*?\r\n\r\n", answer)) is None:
            if b"\r\n\r\n" in answer:
                raise SystemExit(f"{url} answered {answer[:200]!r}")
            answer += connection[0].recv(65536)
        missing = head.end() + int(head[1]) - len(answer)
        while missing > 0:
            missing -= len(connection[0].recv(65536))
        return None

    return ask
