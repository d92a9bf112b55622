"""An engine for the time of a demonstration: a forked process that serves, with all state in a temporary folder."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvferry.app.client import ClientError, KVFerryClient
from kvferry.app.discovery import find_services
from kvferry.app.service.stop_signals import stop_on_signals
from kvferry.app.settings.errors import PREFIX
from kvferry.core.errors import StartError

START_S = 180.0
STOP_S = 20.0
POLL_S = 0.05
MAX_LOG_LINES = 5
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREFIX = "kvferry-demo-"
_PR_SET_PDEATHSIG = 1


@contextmanager
def own_engine(settings: Mapping[str, object]) -> Iterator[str]:
    """Serve with these settings on a free port of loopback, and yield the URL once it is ready.

    Processes and files are gone afterwards, and files of an earlier demonstration that was killed. Fork before threads
    are started. Raises `StartError`.
    """
    # A signal while the process starts or stops must not leave it or the folder behind.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        _remove_left_folders()
        with ExitStack() as undo:
            folder = _make_folder(undo)
            given = {"HOST": "127.0.0.1", "PORT": 0, "STATE_DIR": folder, **settings}
            process = multiprocessing.get_context("fork").Process(target=_serve, args=(folder, given), daemon=True)
            process.start()
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                yield _ready_url(folder, process)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
                process.terminate()
                process.join(STOP_S)
                process.kill()
                process.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _make_folder(undo: ExitStack) -> Path:
    """Return a temporary folder that is locked for as long as this process or one that it forks lives."""
    while True:
        made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        folder = Path(undo.enter_context(made))
        # Another demonstration may remove it before it is locked.
        with suppress(FileNotFoundError):
            _lock(folder, undo)
            if folder.exists():
                return folder


def _remove_left_folders() -> None:
    """Remove the folders of demonstrations that were killed: those of this user that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), ExitStack() as undo:
            if folder.lstat().st_uid == os.geteuid() and _lock(folder, undo):
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, undo: ExitStack) -> bool:
    """Lock a folder until `undo`; return whether this worked. Raises `OSError` if it is none, or a link to one."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    undo.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # In use, or on a file system without locks.
        return False
    return True


def _ready_url(folder: Path, process: multiprocessing.process.BaseProcess) -> str:
    """Wait until the service is ready. Raises `StartError`, with the end of its log, if it is not."""
    deadline_s = time.monotonic() + START_S
    while process.is_alive() and time.monotonic() < deadline_s:
        for found in find_services(folder):
            try:
                with KVFerryClient(found.url, "") as client:
                    client.get("/readyz")
                return found.url
            except ClientError:
                # Not yet.
                continue
        time.sleep(POLL_S)
    lines: list[str] = []
    with suppress(FileNotFoundError):
        lines = (folder / "log").read_text(errors="replace").splitlines()
    raise StartError("\n".join(["the engine does not start:", *lines[-MAX_LOG_LINES:]]))


def _serve(folder: Path, settings: Mapping[str, object]) -> None:
    """Run the service in this forked process until a signal."""
    with suppress(KeyboardInterrupt):
        _run_apart(folder, settings)


def _run_apart(folder: Path, settings: Mapping[str, object]) -> None:
    """Run the service apart from the terminal and its settings."""
    os.setsid()
    # Ends with its parent, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    stop_on_signals(ENDING_SIGNALS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        # It ended before `prctl`.
        sys.exit(0)
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        sys.exit(f"{folder} cannot be written to: {error.strerror}; make space, or set TMPDIR to another folder")
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(folder)
    for name in [name for name in os.environ if name.upper().startswith(PREFIX)]:
        del os.environ[name]
    # Libraries leave files where temporary ones are made.
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ |= {PREFIX + name: str(value) for name, value in settings.items()}
    from kvferry.app.process import run
    from kvferry.app.settings import Settings

    try:
        sys.exit(run(Settings()))
    except StartError as error:
        sys.exit(str(error))
