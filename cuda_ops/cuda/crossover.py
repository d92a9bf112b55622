"""Choice of the copy method per job: the kernel for small segments, the DMA engines for larger ones.

The segment size from which the DMA engines are preferable depends on device, direction and number of segments. It is
measured once per device, driver and `CALIBRATION`, in a fraction of a second, and saved in a file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.copy.segments import Segments
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.cuda.movers import DmaMover, KernelMover, LaunchCopy, Mover, triton_launch
from kvferry.cuda_ops.pool.host_pool import HostPool

_log = logging.getLogger(__name__)

COUNTS = (16, 64, 1024)
SIZES_BYTES = tuple((4 << 10) << doubled for doubled in range(7))
"""4 to 256 KiB."""
ADVANTAGE = 1.3
"""How much faster the kernel has to be. It takes multiprocessors and bandwidth from the compute: on an H200 a loop of
matrix products took 1.12 times as long beside its copies of 16 KiB, 1.05 times beside the DMA engines' of 2 MiB.
"""
CALIBRATION = 2
"""Part of the key of a saved crossover. Raised when the kernel or its calibration changes: earlier ones do not hold."""
BUDGET_S = 0.5
_SCRATCH_BYTES = 64 << 20
_REPEATS = 3

Measure = Callable[[Mover, Direction, int, int], float]
"""Returns the device seconds that a mover takes, from direction, number of segments and bytes per segment."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Steps per direction, ascending: from `count` segments on, the kernel copies those below `bytes`."""

    steps: Mapping[Direction, tuple[tuple[int, int], ...]]

    @classmethod
    def fixed(cls, below_bytes: int) -> Crossover:
        """Return a crossover with one size for all jobs."""
        return cls(dict.fromkeys(Direction, ((0, below_bytes),)))

    def prefers_kernel(self, direction: Direction, count: int, num_bytes: int) -> bool:
        """Return whether the kernel copies a job of `count` segments of `num_bytes` in all.

        Jobs with fewer segments than were measured use the first step.
        """
        steps = self.steps[direction]
        below_bytes = next((below for least, below in reversed(steps) if least <= count), steps[0][1])
        return num_bytes < below_bytes * count

    def as_json(self) -> dict[str, list[list[int]]]:
        """Return the steps as plain lists."""
        return {direction.value: [list(step) for step in steps] for direction, steps in self.steps.items()}

    @classmethod
    def from_json(cls, kept: Mapping[str, Iterable[tuple[int, int]]]) -> Crossover:
        """Parse the result of `as_json`. Raises `ValueError`, `KeyError` or `TypeError` for other input."""
        steps = {d: tuple((int(least), int(below)) for least, below in kept[d.value]) for d in Direction}
        if not all(steps.values()):
            raise ValueError("a direction has no steps")
        return cls(steps)


class CrossoverMover:
    """Selects a `Mover` per job. The kernel needs page-locked host memory: `is_page_locked` says of the pool's."""

    def __init__(self, dma: Mover, kernel: Mover, crossover: Crossover, is_page_locked: Callable[[], bool]) -> None:
        self._dma = dma
        self._kernel = kernel
        self._crossover = crossover
        self._is_page_locked = is_page_locked

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        """See `Mover`."""
        small = self._crossover.prefers_kernel(direction, len(segments.sizes), segments.num_bytes)
        mover = self._kernel if small and self._is_page_locked() else self._dma
        mover.move(direction, segments, stream)

    def close(self) -> None:
        """See `Mover`."""
        self._dma.close()
        self._kernel.close()


def calibrate(
    dma: Mover, kernel: Mover, measure: Measure, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.monotonic
) -> Crossover:
    """Measure both movers, from small segments up until the kernel is not faster by `ADVANTAGE`.

    Sizes that the time budget does not reach are left to the DMA engines. The kernel must have run before: its
    compilation is not part of the budget.
    """
    end_s = clock() + budget_s
    steps: dict[Direction, tuple[tuple[int, int], ...]] = {}
    for direction in Direction:
        found = []
        for count in COUNTS:
            below_bytes = 0
            for size in SIZES_BYTES:
                if count * size > _SCRATCH_BYTES or clock() >= end_s:
                    break
                if ADVANTAGE * measure(kernel, direction, count, size) >= measure(dma, direction, count, size):
                    break
                # The next size, which the DMA engines copy unless the kernel is found to be faster there, too.
                below_bytes = 2 * size
            found.append((count, below_bytes))
        steps[direction] = tuple(found)
    return Crossover(steps)


@contextmanager
def measuring(driver: CudaDriver, scratch_bytes: int = _SCRATCH_BYTES) -> Iterator[Measure]:
    """Yield a `Measure` with memory for jobs of up to `scratch_bytes`. Requires: context current."""
    with ExitStack() as undo:

        def with_undo(handle: int, release: Callable[[int], None]) -> int:
            undo.callback(release, handle)
            return handle

        stream = with_undo(driver.create_stream(), driver.destroy_stream)
        start, end = (with_undo(driver.create_event(timing=True), driver.destroy_event) for _ in range(2))
        device = with_undo(driver.allocate(scratch_bytes), driver.free)
        host = with_undo(driver.allocate_host(scratch_bytes), driver.free_host)
        undo.callback(driver.synchronize_stream, stream)

        def measure(mover: Mover, direction: Direction, count: int, size: int) -> float:
            """Return the best of several runs, after a warm-up run."""
            offsets = np.random.default_rng(0).permutation(count).astype(np.int64) * size
            segments = Segments(device + offsets, host + offsets[::-1].copy(), np.full(count, size, dtype=np.int64))
            best_s = float("inf")
            for repeat in range(_REPEATS + 1):
                driver.record_event(start, stream)
                mover.move(direction, segments, stream)
                driver.record_event(end, stream)
                driver.synchronize_event(end)
                if repeat:
                    best_s = min(best_s, driver.elapsed_s(start, end))
            return best_s

        yield measure


def cached_crossover(file: Path, device: str, measure: Callable[[], Crossover]) -> Crossover:
    """Return the crossover that is saved for this device; measure and save one if there is none."""
    known: dict[str, dict[str, list[list[int]]]] = {}
    try:
        known = json.loads(file.read_text())
        return Crossover.from_json(known[device])  # type: ignore[arg-type]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if not isinstance(error, KeyError):
            _log.warning("copy crossover file is unusable and is rewritten: %s: %s", file, error)
    crossover = measure()
    kept = {**(known if isinstance(known, dict) else {}), device: crossover.as_json()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Every rank of a node may write this file at the same time: the rename makes each write atomic.
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(kept, indent=1))
        part.replace(file)
    except OSError as error:
        _log.warning("copy crossover not saved, it is measured again at the next start: %s", error)
    return crossover


def choose_mover(
    driver: CudaDriver,
    device: int,
    pool: HostPool,
    file: Path,
    below_bytes: int | None = None,
    launch: LaunchCopy | None = None,
) -> Mover:
    """Return a mover for a device.

    Args:
        driver: the CUDA driver.
        device: index as torch counts devices.
        pool: the host pool.
        file: where measured crossovers are saved.
        below_bytes: segment size below which the kernel copies; measured by default, 1 for never.
        launch: the kernel; Triton's by default.

    Raises:
        CudaError: the device is unusable.
    """
    handle = driver.device(device)
    if not driver.reaches_registered_memory(handle):
        _log.warning("blocks are copied one by one: the device has page-locked memory at other addresses")
        return DmaMover(driver, lambda: False)
    dma = DmaMover(driver, lambda: pool.is_page_locked)
    if below_bytes is not None and below_bytes <= 1:
        return dma
    try:
        kernel = KernelMover(driver, triton_launch(device) if launch is None else launch)
    except ImportError as error:
        _log.info("copy kernel not used, Triton is missing: %s", error)
        return dma
    context = driver.retain_context(handle)
    try:
        with driver.current(context):
            _run_once(driver, kernel)
            if below_bytes is None:
                measured_on = f"{driver.describe(handle)}, calibration {CALIBRATION}"
                crossover = cached_crossover(file, measured_on, lambda: _measure(driver, kernel))
            else:
                crossover = Crossover.fixed(below_bytes)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way, and the DMA engines do without it
        _log.warning("copy kernel not used, it does not run: %s", error)
        return dma
    finally:
        driver.release_context(handle)
    return CrossoverMover(dma, kernel, crossover, lambda: pool.is_page_locked)


def _run_once(driver: CudaDriver, kernel: Mover) -> None:
    """Compile and run the kernel once, so that a failure shows before jobs use it.

    A saved crossover does not show whether this machine can compile the kernel.
    """
    try:
        with measuring(driver, COUNTS[0] * SIZES_BYTES[0]) as measure:
            measure(kernel, Direction.STORE, COUNTS[0], SIZES_BYTES[0])
    finally:
        kernel.close()


def _measure(driver: CudaDriver, kernel: Mover) -> Crossover:
    try:
        with measuring(driver) as measure:
            crossover = calibrate(DmaMover(driver), kernel, measure)
    finally:
        kernel.close()
    _log.info("copy crossover measured: %s", crossover.as_json())
    return crossover
