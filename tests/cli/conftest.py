"""What command-line tests share: an empty world, the real service, and commands, in this process or in their own."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.cli import console, main
from tests.harness.commands import run_command
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service, start_service
from tests.harness.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
COMMAND_DEADLINE_S = DEADLINE_S


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


def command_environment(**settings: str) -> dict[str, str]:
    """This process's environment, with the given settings, and output in UTF-8."""
    plain = {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    return os.environ | plain | {f"KVFERRY_{name}": value for name, value in settings.items()}


@pytest.fixture(autouse=True)
def clean_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    # Services of other tests run beside this one.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


@pytest.fixture
def run(clean_world: Path) -> Run:
    """Run `kvferry` with these words, in an empty folder; keywords other than `columns` are settings."""

    def run(*words: str, columns: int = 120, **settings: str) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as world, redirect_stdout(out), redirect_stderr(err):
            for name, value in settings.items():
                world.setenv(f"KVFERRY_{name}", value)
            for output in (console.out, console.err):
                world.setattr(output, "width", columns)
            handlers = {number: signal.getsignal(number) for number in console.INTERRUPTS}
            try:
                code = main(words)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return _checked(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def run_process(clean_world: Path) -> Run:
    """Run as `run` does, in a process of its own: for `serve`, and for what only a process shows."""

    def run(*words: str, columns: int = 120, **settings: str) -> Ran:
        environment = command_environment(**settings) | {"COLUMNS": str(columns)}
        done = run_command(words, environment, clean_world, COMMAND_DEADLINE_S)
        return _checked(done.returncode, done.stdout, done.stderr)

    return run


def _checked(code: int, out: str, err: str) -> Ran:
    assert "Traceback" not in err, err
    return Ran(code, out, err)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real service with two tokens, over a pool so small that blocks have been evicted from it."""
    folder = tmp_path_factory.mktemp("service")
    with start_service(folder, admin_token=ADMIN, read_token=READ, num_slots=16) as service:
        for number in range(4):
            service.engine.answer(LoopRequest(f"r{number}", 128, seed=number, tenant="0123456789abcdef"))
            service.settle()
        service.settle_history()
        yield service


@pytest.fixture
def ask(run: Run, service: Service) -> Run:
    """Run `kvferry` against the service, as its admin."""
    return lambda *words, **settings: run(*words, **{"URL": service.url, "ADMIN_TOKEN": ADMIN} | settings)
