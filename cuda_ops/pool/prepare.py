"""Preparation of a pool's memory: touched on the right NUMA node, and registered with a device.

Both take long for large pools, so several threads do them and report progress.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.cuda_ops.pool.limits import NotEnoughMemory, locked_memory_bytes, memory_limits
from kvferry.cuda_ops.pool.pages import advise, can_populate, populate
from kvferry.cuda_ops.pool.processors import cpus_of_node

_log = logging.getLogger(__name__)

_TOUCH_BYTES = 64 << 20
"""Bytes that a thread touches at once, and the unit of progress."""
_POPULATE_BYTES = 1 << 20
"""Bytes per call of `populate`, during which no other thread of the process can map memory: other threads wait up to a
third of a millisecond at 1 MiB, 22 ms at 64 MiB.
"""


class PoolPhase(StrEnum):
    """Phases of the preparation."""

    TOUCH = "touch"
    REGISTER = "register"


Progress = Callable[[PoolPhase, int, int], None]
"""Receives a phase, the bytes done in it, and all its bytes."""


class HostRegistrar(Protocol):
    """A device that copies faster from and to registered memory."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock pages of memory and register it with the device. Any thread. Raises `OSError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `OSError`."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a pool's memory is prepared.

    With `touch` it is allocated now instead of on first use; a registered pool is always touched. `progress` is called
    from several threads, one at a time.
    """

    touch: bool = False
    huge_pages: bool = False
    numa_node: int | None = None
    num_threads: int = 0
    registrar: HostRegistrar | None = None
    progress: Progress | None = None


def prepare(parts: Sequence[NDArray[np.uint8]], how: Preparation) -> bool:
    """Prepare mapped memory; return whether all of it is registered.

    If a part cannot be registered, none is, and copies are slower; this is logged once. Raises `NotEnoughMemory` if
    there is less memory than the limits allowed.
    """
    if how.huge_pages:
        _ask_for_huge_pages(parts)
    if not how.touch and how.registrar is None:
        return False
    with ThreadPoolExecutor(
        how.num_threads or default_threads(), "kvferry-prepare", initializer=_move_to_node, initargs=(how.numa_node,)
    ) as threads:
        _touch(parts, how, threads)
        return how.registrar is not None and _register(parts, how, how.registrar, threads)


def unregister(parts: Sequence[NDArray[np.uint8]], registrar: HostRegistrar) -> None:
    """Unregister memory that is about to be unmapped. Failures are logged and ignored."""
    for part in parts:
        try:
            registrar.unregister(part.ctypes.data)
        except OSError as error:
            _log.warning("unregistering an extent failed: %s bytes: %s", f"{part.nbytes:,}", error)


def default_threads() -> int:
    """Return the number of processors, limited to the number that saturates memory bandwidth."""
    return min(len(os.sched_getaffinity(0)), 16)


def _counter(phase: PoolPhase, parts: Sequence[NDArray[np.uint8]], how: Preparation) -> Callable[[int], None]:
    """Return a function that counts bytes done and reports the progress, from any thread."""
    total_bytes = sum(part.nbytes for part in parts)
    report, done_bytes, lock = how.progress, 0, threading.Lock()

    def add(num_bytes: int) -> None:
        nonlocal report, done_bytes
        with lock:
            done_bytes += num_bytes
            if report is None:
                return
            try:
                report(phase, done_bytes, total_bytes)
            except Exception:  # noqa: BLE001 - a callback must not stop the preparation
                _log.exception("progress callback of the host pool raised, and is not called again")
                report = None

    return add


def _touch(parts: Sequence[NDArray[np.uint8]], how: Preparation, threads: ThreadPoolExecutor) -> None:
    count = _counter(PoolPhase.TOUCH, parts, how)

    def touch(piece: NDArray[np.uint8]) -> None:
        if can_populate():
            try:
                for at in range(0, piece.nbytes, _POPULATE_BYTES):
                    populate(piece.ctypes.data + at, min(_POPULATE_BYTES, piece.nbytes - at))
            except OSError as error:
                why = "no space left" if error.errno == errno.EFAULT else str(error)
                raise NotEnoughMemory(
                    f"KVFERRY_POOL_BYTES: allocating {piece.nbytes:,} bytes of the pool failed within all limits: {why}"
                ) from error
        else:
            # Kernels without `populate`: only writing allocates a page, and the write must not change its contents.
            piece[:: mmap.PAGESIZE] |= 0
        count(piece.nbytes)

    pieces = [part[at : at + _TOUCH_BYTES] for part in parts for at in range(0, part.nbytes, _TOUCH_BYTES)]
    for _ in threads.map(touch, pieces):
        continue


def _register(
    parts: Sequence[NDArray[np.uint8]], how: Preparation, registrar: HostRegistrar, threads: ThreadPoolExecutor
) -> bool:
    count = _counter(PoolPhase.REGISTER, parts, how)

    def register(part: NDArray[np.uint8]) -> OSError | None:
        try:
            registrar.register(part.ctypes.data, part.nbytes)
        except OSError as error:
            return error
        count(part.nbytes)
        return None

    errors = list(threads.map(register, parts))
    first = next((index for index, error in enumerate(errors) if error is not None), None)
    if first is None:
        return True
    unregister([part for part, error in zip(parts, errors, strict=True) if error is None], registrar)
    available = min(available_bytes for _, available_bytes in memory_limits())
    locked_bytes = locked_memory_bytes()
    _log.warning(
        "KVFERRY_POOL_KIND: the host pool is not page-locked, copies are slower: registering extent %d of %d, %s "
        "bytes, failed: %s (all extents together have %s bytes, memory available is %s bytes, RLIMIT_MEMLOCK is %s)",
        first + 1,
        len(parts),
        f"{parts[first].nbytes:,}",
        errors[first],
        f"{sum(part.nbytes for part in parts):,}",
        f"{available:,}",
        "unlimited" if locked_bytes is None else f"{locked_bytes:,} bytes",
    )
    return False


def _ask_for_huge_pages(parts: Sequence[NDArray[np.uint8]]) -> None:
    try:
        for part in parts:
            advise(part.ctypes.data, part.nbytes, mmap.MADV_HUGEPAGE)
    except OSError as error:
        _log.info("no huge pages for the host pool: %s", error)


def _move_to_node(node: int | None) -> None:
    """Bind the calling thread to a NUMA node: memory is allocated on the node of the thread that touches it first."""
    if node is None:
        return
    cpus = cpus_of_node(node) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    else:
        _log.warning("host pool not bound to NUMA node %d, none of its processors may be used", node)
