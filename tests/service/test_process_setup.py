"""What a process sets up for itself: stacks on a crash, memory that is returned after large bodies, late imports."""

from __future__ import annotations

import signal
import sys

import pytest

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


HOLD_AND_FREE = """
import sys
from kvferry.app.service.startup import return_large_allocations

def resident_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) << 10

return_large_allocations()
first = b"x" * (16 << 20)
del first
before, small = resident_bytes(), []
for _ in range(10):
    large = [b"x" * (16 << 20) for _ in range(2)]
    small.append([bytes(100 << 10) for _ in range(10)])
    large.append(b"x" * (15 << 20))
    small.append([bytes(100 << 10) for _ in range(10)])
    del large
del small[::2]
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_large_bodies_once_freed_is_returned() -> None:
    assert int(run_script(HOLD_AND_FREE).stdout) < 32 << 20


LIST_ROUTES = """
import sys
import kvferry.app.service.server
print([name for name in sys.modules if name.startswith("kvferry.app.api.routes")])
"""


def test_import_of_the_server_leaves_out_the_admin_routes() -> None:
    done = run_script(LIST_ROUTES)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
