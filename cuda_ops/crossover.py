"""Which way a job is copied: by the kernel below a size of segment, by the DMA engines from it on.

The size differs by device, by direction and by how many segments there are, so it is measured: once a device and
driver, in a fraction of a second, and kept in a file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.dma import Mover
from kvferry.cuda_ops.driver import CudaDriver
from kvferry.cuda_ops.segments import Segments

_log = logging.getLogger(__name__)

COUNTS = (64, 1024)
SIZES_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
BUDGET_S = 0.5
_SCRATCH_BYTES = 64 << 20
_REPEATS = 3

Measure = Callable[[Mover, Direction, int, int], float]
"""Device seconds that a mover takes in a direction for so many segments of so many bytes."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """For each direction, in ascending order: from so many segments on, the kernel is faster below so many bytes a
    segment."""

    steps: Mapping[Direction, tuple[tuple[int, int], ...]]

    @classmethod
    def fixed(cls, below_bytes: int) -> Crossover:
        """One size for everything."""
        return cls(dict.fromkeys(Direction, ((0, below_bytes),)))

    def prefers_kernel(self, direction: Direction, count: int, num_bytes: int) -> bool:
        """For a job of so many segments and bytes. Fewer segments than were measured count as the fewest."""
        steps = self.steps[direction]
        below_bytes = next((below for least, below in reversed(steps) if least <= count), steps[0][1])
        return num_bytes < below_bytes * count

    def as_json(self) -> dict[str, list[list[int]]]:
        """Plain lists."""
        return {direction.value: [list(step) for step in steps] for direction, steps in self.steps.items()}

    @classmethod
    def of_json(cls, kept: Mapping[str, Iterable[tuple[int, int]]]) -> Crossover:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `as_json` cannot have written."""
        steps = {d: tuple((int(least), int(below)) for least, below in kept[d.value]) for d in Direction}
        if not all(steps.values()):
            raise ValueError("a direction without a step")
        return cls(steps)


class CrossoverMover:
    """A `Mover` that is two. The kernel reaches registered memory only, which `is_pinned` tells of."""

    def __init__(self, dma: Mover, kernel: Mover, crossover: Crossover, is_pinned: Callable[[], bool]) -> None:
        self._dma = dma
        self._kernel = kernel
        self._crossover = crossover
        self._is_pinned = is_pinned

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        """See `Mover`."""
        small = self._crossover.prefers_kernel(direction, len(segments.sizes), segments.num_bytes)
        mover = self._kernel if small and self._is_pinned() else self._dma
        mover.move(direction, segments, stream)

    def close(self) -> None:
        """See `Mover`."""
        self._dma.close()
        self._kernel.close()


def calibrate(
    dma: Mover, kernel: Mover, measure: Measure, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.monotonic
) -> Crossover:
    """Measure both, from small segments up until the DMA engines win. What the budget has no time for is theirs. The
    kernel has run before: to compile it is not what the budget is for."""
    end_s = clock() + budget_s
    steps: dict[Direction, tuple[tuple[int, int], ...]] = {}
    for direction in Direction:
        found = []
        for count in COUNTS:
            below_bytes = 0
            for size in SIZES_BYTES:
                if count * size > _SCRATCH_BYTES or clock() >= end_s:
                    break
                if measure(kernel, direction, count, size) >= measure(dma, direction, count, size):
                    break
                # The next size is four times this one: as far from it as from that.
                below_bytes = 2 * size
            found.append((count, below_bytes))
        steps[direction] = tuple(found)
    return Crossover(steps)


class DeviceMeasure:
    """A `Measure` on memory of its own, with the context current, between `__enter__` and `__exit__`, with room for
    jobs of `scratch_bytes`."""

    def __init__(self, driver: CudaDriver, scratch_bytes: int = _SCRATCH_BYTES) -> None:
        self._driver = driver
        self._scratch_bytes = scratch_bytes

    def __enter__(self) -> DeviceMeasure:
        driver = self._driver
        with ExitStack() as taken:

            def take(handle: int, give_back: Callable[[int], None]) -> int:
                taken.callback(give_back, handle)
                return handle

            self._stream = take(driver.create_stream(), driver.destroy_stream)
            self._start, self._end = (take(driver.create_event(timing=True), driver.destroy_event) for _ in range(2))
            self._device = take(driver.allocate(self._scratch_bytes), driver.free)
            self._host = take(driver.allocate_host(self._scratch_bytes), driver.free_host)
            self._taken = taken.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._taken:
            self._driver.synchronize_stream(self._stream)

    def __call__(self, mover: Mover, direction: Direction, count: int, size: int) -> float:
        """The best of a few, after one that warms up."""
        offsets = np.random.default_rng(0).permutation(count).astype(np.int64) * size
        segments = Segments(
            self._device + offsets, self._host + offsets[::-1].copy(), np.full(count, size, dtype=np.int64)
        )
        best_s = float("inf")
        for repeat in range(_REPEATS + 1):
            self._driver.record_event(self._start, self._stream)
            mover.move(direction, segments, self._stream)
            self._driver.record_event(self._end, self._stream)
            self._driver.synchronize_event(self._end)
            if repeat:
                best_s = min(best_s, self._driver.elapsed_s(self._start, self._end))
        return best_s


def kept_crossover(file: Path, device: str, measure: Callable[[], Crossover]) -> Crossover:
    """What the file knows of a device, or else what is measured now, which it then knows too."""
    known: dict[str, dict[str, list[list[int]]]] = {}
    try:
        known = json.loads(file.read_text())
        return Crossover.of_json(known[device])  # type: ignore[arg-type]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not isinstance(error, KeyError):
            _log.warning("%s does not say which copies are faster, and is written again: %s", file, error)
    crossover = measure()
    kept = {**(known if isinstance(known, dict) else {}), device: crossover.as_json()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Every rank of a node may be at this, so nobody gets to read half of it.
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(kept, indent=1))
        part.replace(file)
    except OSError as error:
        _log.warning("which copies are faster will be measured again at the next start: %s", error)
    return crossover
