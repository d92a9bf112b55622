"""Making memory ready before it is served from: touched, near the right processors, and registered with a device.

Both take long for large pools, so several threads do them, and say how far they are.
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

from kvferry.cuda_ops.limits import NotEnoughMemory, locked_memory_bytes, memory_limits
from kvferry.cuda_ops.numa import cpus_of_node
from kvferry.cuda_ops.pages import advise, can_populate, populate

_log = logging.getLogger(__name__)

_TOUCH_BYTES = 64 << 20
"""What a thread takes on at once, and progress is told by."""
_POPULATE_BYTES = 1 << 20
"""While the kernel is asked for pages, nobody else in the process can map memory, as an engine does that computes while
its pool grows: at a megabyte a call others wait a third of a millisecond, at 64 it was 22."""


class PoolPhase(StrEnum):
    """What is being done to a pool's memory."""

    TOUCH = "touch"
    REGISTER = "register"


@dataclass(frozen=True, slots=True)
class PoolProgress:
    """How far a phase is."""

    phase: PoolPhase
    done_bytes: int
    total_bytes: int


class HostRegistrar(Protocol):
    """A device that copies faster from and to memory that it knows."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock memory in place and make it known to the device. Any thread. Raises `OSError`."""

    def unregister(self, address: int) -> None:
        """Undo it. Raises `OSError`."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a pool's memory is made ready. `touch` takes it at once instead of when it is first used; a registered pool
    is touched in any case. `progress` is called from several threads, one at a time.
    """

    touch: bool = False
    huge_pages: bool = False
    numa_node: int | None = None
    num_threads: int = 0
    registrar: HostRegistrar | None = None
    progress: Callable[[PoolProgress], None] | None = None


def prepare(parts: Sequence[NDArray[np.uint8]], how: Preparation) -> bool:
    """Make mapped memory ready; whether all of it is registered.

    Memory that cannot be registered works, slower: then none of `parts` is, and it is logged once. Raises
    `NotEnoughMemory` when there is less than was promised.
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
    """Undo the registration of memory that is about to go. What the device refuses is logged: it goes in any case."""
    for part in parts:
        try:
            registrar.unregister(part.ctypes.data)
        except OSError as error:
            _log.warning("an extent of %s bytes could not be unregistered: %s", f"{part.nbytes:,}", error)


def default_threads() -> int:
    """As many as there are processors, up to what saturates a machine's memory."""
    return min(len(os.sched_getaffinity(0)), 16)


class _Progress:
    def __init__(self, phase: PoolPhase, parts: Sequence[NDArray[np.uint8]], how: Preparation) -> None:
        self._phase = phase
        self._total_bytes = sum(part.nbytes for part in parts)
        self._tell = how.progress
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._tell is None:
                return
            try:
                self._tell(PoolProgress(self._phase, self._done_bytes, self._total_bytes))
            except Exception:  # noqa: BLE001 - whoever watches must not stop what is watched
                _log.exception("progress of the host pool could not be told, and is not told again")
                self._tell = None


def _touch(parts: Sequence[NDArray[np.uint8]], how: Preparation, threads: ThreadPoolExecutor) -> None:
    progress = _Progress(PoolPhase.TOUCH, parts, how)

    def touch(piece: NDArray[np.uint8]) -> None:
        if can_populate():
            try:
                for at in range(0, piece.nbytes, _POPULATE_BYTES):
                    populate(piece.ctypes.data + at, min(_POPULATE_BYTES, piece.nbytes - at))
            except OSError as error:
                why = "there is no room left" if error.errno == errno.EFAULT else str(error)
                raise NotEnoughMemory(
                    f"KVFERRY_POOL_BYTES: taking {piece.nbytes:,} bytes of the pool failed, although the limits had "
                    f"room: {why}"
                ) from error
        else:
            # An older kernel: only writing takes a page, and what is there stays.
            piece[:: mmap.PAGESIZE] |= 0
        progress.add(piece.nbytes)

    pieces = [part[at : at + _TOUCH_BYTES] for part in parts for at in range(0, part.nbytes, _TOUCH_BYTES)]
    for _ in threads.map(touch, pieces):
        continue


def _register(
    parts: Sequence[NDArray[np.uint8]], how: Preparation, registrar: HostRegistrar, threads: ThreadPoolExecutor
) -> bool:
    progress = _Progress(PoolPhase.REGISTER, parts, how)

    def register(part: NDArray[np.uint8]) -> OSError | None:
        try:
            registrar.register(part.ctypes.data, part.nbytes)
        except OSError as error:
            return error
        progress.add(part.nbytes)
        return None

    errors = list(threads.map(register, parts))
    first = next((index for index, error in enumerate(errors) if error is not None), None)
    if first is None:
        return True
    unregister([part for part, error in zip(parts, errors, strict=True) if error is None], registrar)
    available = min(limit.available_bytes for limit in memory_limits())
    locked_bytes = locked_memory_bytes()
    _log.warning(
        "KVFERRY_POOL_KIND: the host pool is not pinned, and copies will be slower: registering extent %d of %d, %s "
        "bytes, "
        "failed: %s (all extents together have %s bytes, memory available is %s bytes, RLIMIT_MEMLOCK is %s)",
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
        _log.info("the kernel gives no huge pages for the host pool: %s", error)


def _move_to_node(node: int | None) -> None:
    """Memory is taken near the processor that touches it first, so the calling thread moves to that node."""
    if node is None:
        return
    cpus = cpus_of_node(node) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    else:
        _log.warning("no processor of NUMA node %d may be used: the host pool is taken wherever there is room", node)
