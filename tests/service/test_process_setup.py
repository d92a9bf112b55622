"""What a process sets up for itself: stacks on a crash, late imports."""

from __future__ import annotations

import signal

from tests.harness.commands import run_script

BUS_ERROR = """
import os, signal
from kvferry.app.service.startup import enable_crash_report
enable_crash_report()
os.kill(os.getpid(), signal.SIGBUS)
"""


def test_a_bus_error_leaves_the_stacks_of_all_threads_on_stderr() -> None:
    done = run_script(BUS_ERROR)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


LIST_ROUTES = """
import sys
import kvferry.app.service.server
print([name for name in sys.modules if name.startswith("kvferry.app.api.routes")])
"""


def test_import_of_the_server_leaves_out_the_admin_routes() -> None:
    done = run_script(LIST_ROUTES)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
