"""What memory there is, is read where the kernel says it, and the tightest limit is the one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cuda_ops.pool.limits import (
    NotEnoughMemory,
    check_fits,
    file_limits,
    memory_limits,
    shared_memory_limits,
)
from kvferry.cuda_ops.pool.processors import cpus_of_node, node_of_pci_device


def test_the_tightest_limit_is_the_one_that_is_named() -> None:
    """vllm#42348, vllm#53042: more memory was configured than there is, and 1.92 times as much taken."""
    limits = [("memory", 1000), ("the cgroup", 500)]
    check_fits("POOL_BYTES", 500, limits)
    with pytest.raises(NotEnoughMemory, match=r"asks for 501 bytes .* the cgroup is 500 bytes"):
        check_fits("POOL_BYTES", 501, limits)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_cgroups_count_without_their_unused_page_cache(tmp_path: Path, version: int) -> None:
    mount = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    unlimited = str(2**63 - 4096) if version == 1 else "max"
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "5:cpu,memory:/box/inner" if version == 1 else "0::/box/inner"
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/elsewhere\n{line}\n")
    for folder, limit, used in (("", unlimited, 9), ("box", "5000", 1000), ("box/inner", "9000", 500)):
        (mount / folder).mkdir(parents=True, exist_ok=True)
        (mount / folder / names[0]).write_text(f"{limit}\n")
        (mount / folder / names[1]).write_text(f"{used}\n")
    cache = "total_inactive_file" if version == 1 else "inactive_file"
    (mount / "box/memory.stat").write_text(f"anon 100\ninactive_file 300\nactive_file 50\n{cache} 400\n")
    left = [available for name, available in memory_limits(tmp_path) if "cgroup" in name]
    assert sorted(left) == [4400, 8500]


def test_file_system_space_limits_pools_in_it(tmp_path: Path) -> None:
    ((name, available_bytes),) = file_limits(tmp_path)
    assert name == f"space left on the disk of {tmp_path}"
    assert available_bytes > 0
    shared, *memory = shared_memory_limits(Path("/dev/shm"))
    assert "--shm-size" in shared[0]
    assert [name for name, _ in memory] == [name for name, _ in memory_limits()]


def test_processors_and_devices_of_a_numa_node(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("2-4,8\n")
    assert cpus_of_node(1, tmp_path) == {2, 3, 4, 8}
    assert cpus_of_node(2, tmp_path) == frozenset()
    for name, text in (("0000:3b:00.0", "1\n"), ("0000:5e:00.0", "-1\n")):
        (tmp_path / "sys/bus/pci/devices" / name).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / name / "numa_node").write_text(text)
    assert node_of_pci_device("0000:3B:00.0", tmp_path) == 1
    assert node_of_pci_device("0000:5e:00.0", tmp_path) is None
    assert node_of_pci_device("0000:99:00.0", tmp_path) is None
