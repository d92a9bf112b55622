"""Which processors are near which memory, and which memory is near a GPU, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path


def cpus_of_node(node: int, root: Path = Path("/")) -> frozenset[int]:
    """The processors of a NUMA node; empty where the kernel does not know it."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return frozenset()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_of_pci_device(address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a device by its PCI address, such as `0000:3b:00.0`; None where there is but one, or none is
    known."""
    try:
        node = int((root / f"sys/bus/pci/devices/{address.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
