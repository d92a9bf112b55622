"""A process that a signal ends leaves a line that says where."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.harness.service_process import ROOT

SCRIPT = """
import os, signal
from kvferry.app.service.startup import enable_crash_report
enable_crash_report()
os.kill(os.getpid(), signal.SIGBUS)
"""


def test_a_bus_error_leaves_the_stacks_of_all_threads_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
