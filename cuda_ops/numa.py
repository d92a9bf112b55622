"""NUMA topology as reported by the kernel: processors of a node, and the node of a PCI device."""

from __future__ import annotations

from pathlib import Path


def cpus_of_node(node: int, root: Path = Path("/")) -> frozenset[int]:
    """Return the processors of a NUMA node; empty if the kernel does not report it."""
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
    """Return the NUMA node of a PCI device, such as `0000:3b:00.0`; None if there is one node or it is unknown."""
    try:
        node = int((root / f"sys/bus/pci/devices/{address.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
