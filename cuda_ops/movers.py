"""Selection of the mover for a device: DMA engines alone, or together with the kernel where it works and is faster."""

from __future__ import annotations

import logging
from pathlib import Path

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.crossover import (
    COUNTS,
    SIZES_BYTES,
    Crossover,
    CrossoverMover,
    DeviceMeasure,
    calibrate,
    kept_crossover,
)
from kvferry.cuda_ops.dma import DmaMover, Mover
from kvferry.cuda_ops.driver import CudaDriver
from kvferry.cuda_ops.host_pool import HostPool
from kvferry.cuda_ops.kernel import KernelMover, LaunchCopy, triton_launch

_log = logging.getLogger(__name__)


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
        _log.warning("blocks are copied one by one: the device maps pinned memory at other addresses than the host")
        return DmaMover(driver, lambda: False)
    dma = DmaMover(driver, lambda: pool.is_pinned)
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
                crossover = kept_crossover(file, driver.describe(handle), lambda: _measure(driver, kernel))
            else:
                crossover = Crossover.fixed(below_bytes)
    except Exception as error:  # # noqa: BLE001 - a compiler may fail in any way, and the DMA engines do without it
        _log.warning("copy kernel not used, it does not run: %s", error)
        return dma
    finally:
        driver.release_context(handle)
    return CrossoverMover(dma, kernel, crossover, lambda: pool.is_pinned)


def _run_once(driver: CudaDriver, kernel: Mover) -> None:
    """Compile and run the kernel once, so that a failure shows before jobs use it.

    A saved crossover does not show whether this machine can compile the kernel.
    """
    try:
        with DeviceMeasure(driver, COUNTS[0] * SIZES_BYTES[0]) as measure:
            measure(kernel, Direction.STORE, COUNTS[0], SIZES_BYTES[0])
    finally:
        kernel.close()


def _measure(driver: CudaDriver, kernel: Mover) -> Crossover:
    try:
        with DeviceMeasure(driver) as measure:
            crossover = calibrate(DmaMover(driver), kernel, measure)
    finally:
        kernel.close()
    _log.info("copy crossover measured: %s", crossover.as_json())
    return crossover
