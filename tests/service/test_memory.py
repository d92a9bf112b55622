"""Memory that a burst of large bodies took is returned to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    ran = subprocess.run([sys.executable, "-c", HOLD_AND_FREE], capture_output=True, text=True, check=True, timeout=60)
    assert int(ran.stdout) < 32 << 20
