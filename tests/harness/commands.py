"""`kvferry` commands, Python code and modules as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.harness.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]

Command = subprocess.Popen[bytes]


def start_command(
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[str] | int,
    stderr: IO[str] | int,
) -> Command:
    """Start `kvferry WORDS` with nothing on standard input."""
    words = [sys.executable, "-P", "-m", "kvferry.app.cli", *words]
    return subprocess.Popen(words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)


def run_command(
    words: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `kvferry WORDS` to its end. Raises `subprocess.TimeoutExpired`, after which it is killed."""
    return _run(["-P", "-m", "kvferry.app.cli", *words], env, cwd, timeout)


def run_script(code: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python code, which reads `arguments` as `sys.argv[1:]`."""
    return _run(["-c", code, *map(str, arguments)], _script_environment(), cwd, DEADLINE_S)


def run_module(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a module as `python -m` does."""
    return _run(["-m", name, *map(str, arguments)], _script_environment(), ROOT, 300)


@contextmanager
def running_script(code: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Python code as a process, which is killed in the end, and what it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=_script_environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            process.kill()
            process.wait(DEADLINE_S)


def _script_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def _run(words: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )
