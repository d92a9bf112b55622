"""A server on loopback as a process of its own, which tests pause, kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.harness.waiting import wait_until

_kept: list[socket.socket] = []


def free_port(num_ports: int = 1) -> int:
    """A port of loopback on which no other process can listen before this one ends, or the first of some in a row.

    It stays bound here. A server can listen on it none the less, and again, if it sets SO_REUSEADDR, as servers do.
    """
    first = _bind(0)
    try:
        for port in range(first + 1, first + num_ports):
            _bind(port)
    except OSError:
        return free_port(num_ports)
    return first


def _bind(port: int) -> int:
    kept = socket.socket()
    _kept.append(kept)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    return int(kept.getsockname()[1])


class ServerProcess(ABC):
    """A server on a free port. A subclass says how it is started, and when it answers."""

    start_s = 60.0

    def __init__(self) -> None:
        """Start it. Raises `RuntimeError` if it ends."""
        self.port = free_port()
        self.start()

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Program and arguments of a server on `port`."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the process that was started last can be used."""

    def start(self) -> None:
        command = self.command()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._has_started, f"the start of {command[0]}", self.start_s)

    def _has_started(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.command()} ended with {self.process.returncode}")
        return self.answers()

    def pause(self) -> None:
        """Stop all threads; a signal alone returns before they have."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs: a signal alone returns before that."""
    try:
        return all("\nState:\tT" in thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/status"))
    except (FileNotFoundError, ProcessLookupError):
        # One that has just ended.
        return False


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """These processes do not run meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(map(_is_stopped, pids)), "all threads are stopped")
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def paused(server: ServerProcess) -> Iterator[None]:
    """The server does not answer meanwhile."""
    server.pause()
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            server.resume()
