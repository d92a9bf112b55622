"""The process that the small one is born of: all is loaded and no thread runs, so a life begins in milliseconds.

It reads a line for each life, `seed life_s start_s mood`, and answers what the life came to. `start_s` may be `-`; a
mood is `calm` or `wild`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from pathlib import Path

from kvferry.core.pool.manager import OffloadManager
from tests.kill.small import Small


def live(folder: Path, seed: int, life_s: float, start_s: float | None, calm: bool) -> str:
    """Fork, wait, kill: `served`, `started` if it did not come to serve, or how it ended by itself."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        _serve(folder, seed, calm, writable)
    os.close(writable)
    # The child closes its end only by its death.
    served = _wait(readable, start_s) and os.read(readable, 1) == b"s"
    if served:
        _wait(readable, life_s)
    os.kill(child, signal.SIGKILL)
    os.close(readable)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        return f"ended by itself with status {status}"
    return "served" if served else "started"


def _wait(file: int, timeout_s: float | None) -> bool:
    return bool(select.select([file], [], [], timeout_s)[0])


def _serve(folder: Path, seed: int, calm: bool, told: int) -> None:
    try:
        small = Small(folder, seed, calm)
        os.write(told, b"s")
        while True:
            small.step()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


if __name__ == "__main__":
    # Compiles, or reads the stored code.
    import kvferry.cuda_ops.copy.segment_copier  # noqa: F401

    OffloadManager(1, 1)
    for line in sys.stdin:
        words = line.split()
        start_s = None if words[2] == "-" else float(words[2])
        outcome = live(Path(sys.argv[1]), int(words[0]), float(words[1]), start_s, words[3] == "calm")
        sys.stdout.write(outcome + "\n")
        sys.stdout.flush()
