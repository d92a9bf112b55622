"""A server on loopback as a process of its own, which tests pause, kill and start again."""

from __future__ import annotations

import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.harness.waiting import wait_until

NUM_TRIES = 5


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ServerProcess(ABC):
    """A server on a free port. A subclass says how it is started, and when it answers."""

    start_s = 60.0

    def __init__(self) -> None:
        """Start it. Raises `RuntimeError` if it ends, even on other ports."""
        for attempt in range(NUM_TRIES):
            self.port = free_port()
            try:
                self.start()
                break
            except RuntimeError:
                # Another process took the port.
                if attempt == NUM_TRIES - 1:
                    raise

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
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def paused(server: ServerProcess) -> Iterator[None]:
    """The server does not answer meanwhile."""
    server.pause()
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            server.resume()
