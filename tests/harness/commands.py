"""`kvferry` commands as processes forked from one that has imported everything: about 0.05 s each instead of 1 to 8 s.

A process is what `python -m kvferry.app.cli WORDS` makes: it has its own pid, environment, working folder and streams,
runs `main` of the command line, and ends as an interpreter ends. What depends on imports (time to help, signals while
importing) and on the console script is tested with processes of their own. Scripts of tests are forked in the same way,
and so are the processes of a run with several (`forked_worker.py`).
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

from tests.harness.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
RUN = "TEST_RUN"
"""Environment variable with a name for this run of pytest: one process forks all other processes of the run."""
# Read by libraries while they are imported, so one value holds for all commands.
_IMPORT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}


class Command:
    """A running command: the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: int, words: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._words = words

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number; nothing while the process runs."""
        return self._reap(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._reap(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(["kvferry", *self._words], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                # It may have ended since, as its exit code arrives a moment later.
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, 32)
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(int(said)) if said else -signal.SIGKILL
        return self.returncode


def start_command(
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[str] | int,
    stderr: IO[str] | int,
    import_path: Path = ROOT,
    stdin: int | None = None,
) -> Command:
    """Start `kvferry WORDS`, or a script if they are `-c` and Python code, and what it reads as `sys.argv[1:]`.

    Without `stdin`, its standard input is empty. The files may be closed as soon as this returns. With another
    `import_path` it is the version of kvferry there.
    """
    with open(os.devnull) as empty:
        streams = (empty if stdin is None else stdin, stdout, stderr)
        return _forker(import_path).start(words, env, cwd, streams)


def run_command(
    words: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `kvferry WORDS` to its end. Raises `subprocess.TimeoutExpired`, after which it is killed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = start_command(words, env, cwd, out, err)
        try:
            code = command.wait(timeout)
        finally:
            command.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(words), code, out.read(), err.read())


def run_script(code: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return run_command(["-c", code, *map(str, arguments)], os.environ, cwd, DEADLINE_S)


def run_module(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a module as `python -m` does, in a process of its own."""
    code = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    return run_command(["-c", code, name, *map(str, arguments)], os.environ, ROOT, 300)


@contextmanager
def running_script(code: str, *arguments: object) -> Iterator[tuple[Command, IO[str]]]:
    """Python code in a process of its own, which is killed in the end, and what it prints."""
    readable, writable = os.pipe()
    with open(readable) as out:
        try:
            process = start_command(["-c", code, *map(str, arguments)], os.environ, ROOT, writable, 2)
        finally:
            os.close(writable)
        try:
            yield process, out
        finally:
            process.kill()
            process.wait(DEADLINE_S)


class _Forker:
    """A connection to the process that commands are forked from, which serves all test processes of a run."""

    def __init__(self, import_path: Path) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        run = os.environ.get(RUN, str(os.getpid()))
        # In the abstract namespace of Linux: gone with the process that listens.
        address = f"\0kvferry-tests-{os.getuid()}-{run}-{zlib.crc32(bytes(import_path)):x}"
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                listener.listen()
                self._process = _start_forker(listener, import_path)
        # The process that has bound the address may not listen yet.
        wait_until(lambda: self._socket.connect_ex(address) == 0, "the process that commands are forked from")

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        streams: Sequence[IO[str] | int],
    ) -> Command:
        files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        request = json.dumps({"words": list(words), "env": dict(env), "cwd": str(cwd)}).encode()
        status, writable = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [len(request).to_bytes(4)], [*files, writable])
                self._socket.sendall(request)
                pid = int.from_bytes(self._socket.recv(4, socket.MSG_WAITALL))
        finally:
            os.close(writable)
        if not pid:
            raise RuntimeError("the process that commands are forked from has ended")
        return Command(pid, status, words)


def _start_forker(listener: socket.socket, import_path: Path) -> subprocess.Popen[bytes]:
    """Start the process that accepts connections at this listener, and ends with the last of them."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVFERRY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness.commands", str(listener.fileno())],
        cwd=ROOT,
        env=env | _IMPORT_ENVIRONMENT | {"PYTHONPATH": f"{import_path}{os.pathsep}{ROOT}"},
        stdin=subprocess.DEVNULL,
        # Standard output may be the connection of a test process to the one that started it.
        stdout=2,
        pass_fds=[listener.fileno()],
    )


_started: dict[Path, _Forker] = {}
_starting = threading.Lock()


def _forker(import_path: Path) -> _Forker:
    with _starting:
        if import_path not in _started:
            _started[import_path] = _Forker(import_path)
        return _started[import_path]


def _import_everything() -> None:
    import anyio
    import httpx

    import kvferry.app
    from kvferry.core.pool.manager import OffloadManager

    gc.disable()
    for module in pkgutil.walk_packages(kvferry.app.__path__, "kvferry.app."):
        if not module.name.startswith(("kvferry.app.cli.__main__", "kvferry.app.engines.vllm")):
            importlib.import_module(module.name)
    # What these import when they are used first.
    httpx.Client().close()
    lazily = ("anyio._backends._asyncio", "pydantic.v1", "rich._emoji_codes", "uvicorn.lifespan.off", "uvloop")
    for name in (*lazily, "kvferry.cuda_ops.copy.segment_copier"):
        importlib.import_module(name)
    # It comes with a plugin of pytest, which warns of those that it finds imported without this mark.
    anyio.__doc__ = "PYTEST_DONT_REWRITE"
    OffloadManager(1, 1)
    # Handlers of libraries are for the process that imported them.
    atexit._clear()
    gc.freeze()
    gc.enable()


def _serve_forks(listener: socket.socket) -> None:
    """Fork a command for each request, and write how it ended to the pipe that came with it.

    Returns once all connections are closed.
    """
    _import_everything()
    clients = [listener.accept()[0]]
    statuses: dict[int, int] = {}
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while clients:
        for ready in select.select([listener, woken, *clients], [], [])[0]:
            if ready is listener:
                clients.append(listener.accept()[0])
            elif ready is woken:
                woken.recv(1024)
                while statuses and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    status = statuses.pop(ended[0])
                    # The test may have forgotten the command by now.
                    if select.select([], [status], [], 0)[1]:
                        _write(status, str(ended[1]).encode())
                    os.close(status)
            else:
                size, files, _, _ = socket.recv_fds(ready, 4, 4)
                if not size:
                    clients.remove(ready)
                    ready.close()
                    continue
                request = json.loads(ready.recv(int.from_bytes(size), socket.MSG_WAITALL))
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for end in (listener, woken, wake, *clients):
                        end.close()
                    for file in (files[3], *statuses.values()):
                        os.close(file)
                    _become(request, files[:3])
                statuses[pid] = files.pop()
                for file in files:
                    os.close(file)
                ready.sendall(pid.to_bytes(4))


def _write(file: int, data: bytes) -> None:
    try:
        os.write(file, data)
    except BrokenPipeError:
        pass


def _become(request: dict[str, object], streams: Sequence[int]) -> NoReturn:
    """Run the command in this process, which ends with it."""
    from kvferry.app.cli import main

    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    os.chdir(str(request["cwd"]))
    words = list(request["words"])  # type: ignore[call-overload]
    code = 1
    try:
        if words[:1] == ["-c"]:
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<script>", "exec"), {"__name__": "__main__"})
            code = 0
        else:
            sys.argv = ["kvferry", *words]
            code = main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # As multiprocessing ends what it has forked: freeing all modules would take 2 s.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Ctrl-C ends pytest, which closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
