"""An engine for the time of a demonstration: a process of `kvferry serve`, with all state in a temporary folder."""

from __future__ import annotations

import os
import subprocess  # nosec B404 # the command is our own
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvferry.app.client import ClientError, KVFerryClient
from kvferry.app.common.discovery import find_services
from kvferry.app.settings.errors import PREFIX
from kvferry.core.errors import StartError

START_S = 180.0
STOP_S = 20.0
POLL_S = 0.05
MAX_LOG_LINES = 5
_SERVE = (sys.executable, "-m", "kvferry.app.cli", "serve")


@contextmanager
def own_engine(settings: Mapping[str, object]) -> Iterator[str]:
    """Serve with these settings on a free port of loopback, and yield the URL once it is ready.

    Process and files are gone afterwards. Raises `StartError`.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Settings of the user are for another service. Libraries leave files where temporary ones are made.
        env = {key: value for key, value in os.environ.items() if not key.upper().startswith(PREFIX)}
        given = {"HOST": "127.0.0.1", "PORT": 0, "STATE_DIR": folder, **settings}
        env |= {"TMPDIR": name, "XDG_RUNTIME_DIR": name} | {PREFIX + key: str(value) for key, value in given.items()}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(  # nosec B603 # no shell, and no word of it is from outside
                _SERVE,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Signals of the terminal are for the demonstration, which stops the engine then.
                start_new_session=True,
            )
        try:
            yield _ready_url(folder, process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_url(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until the service is ready. Raises `StartError`, with the end of its log, if it is not."""
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        for service in find_services(folder):
            try:
                with KVFerryClient(service.url, None) as client:
                    client.get("/readyz")
                return service.url
            except ClientError:
                # Not yet.
                continue
        time.sleep(POLL_S)
    lines = (folder / "log").read_text(errors="replace").splitlines()
    raise StartError("\n".join(["the engine does not start:", *lines[-MAX_LOG_LINES:]]))
