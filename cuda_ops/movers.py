"""The mover for a device: DMA engines alone, or with the kernel beside them where that is there and is faster."""

from __future__ import annotations

import logging
from pathlib import Path

from cuda_ops.crossover import Crossover, CrossoverMover, DeviceMeasure, calibrate, kept_crossover
from cuda_ops.dma import DmaMover, Mover
from cuda_ops.driver import CudaDriver
from cuda_ops.host_pool import HostPool
from cuda_ops.kernel import KernelMover, LaunchCopy, triton_launch

_log = logging.getLogger(__name__)


def choose_mover(
    driver: CudaDriver,
    device: int,
    pool: HostPool,
    file: Path,
    below_bytes: int | None = None,
    launch: LaunchCopy | None = None,
) -> Mover:
    """For a device as torch counts them. `below_bytes` is where the kernel ends, measured by default and then kept in
    `file`; `launch` is the kernel, Triton's by default. Raises `CudaError` where the device is not usable at all.
    """
    handle = driver.device(device)
    if not driver.reaches_registered_memory(handle):
        _log.warning("blocks are copied one by one, since the device has pinned memory at addresses of its own")
        return DmaMover(driver, lambda: False)
    dma = DmaMover(driver, lambda: pool.is_pinned)
    try:
        kernel = KernelMover(driver, triton_launch(device) if launch is None else launch)
    except ImportError as error:
        _log.info("small blocks are copied by the DMA engines too, since there is no Triton (%s)", error)
        return dma
    if below_bytes is not None:
        return CrossoverMover(dma, kernel, Crossover.fixed(below_bytes), lambda: pool.is_pinned)
    context = driver.retain_context(handle)
    try:
        with driver.current(context):
            crossover = kept_crossover(file, driver.describe(handle), lambda: _measure(driver, kernel))
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way, and the DMA engines do without it
        _log.warning("small blocks are copied by the DMA engines too, since the kernel does not run: %s", error)
        return dma
    finally:
        driver.release_context(handle)
    return CrossoverMover(dma, kernel, crossover, lambda: pool.is_pinned)


def _measure(driver: CudaDriver, kernel: Mover) -> Crossover:
    try:
        with DeviceMeasure(driver) as measure:
            crossover = calibrate(DmaMover(driver), kernel, measure)
    finally:
        kernel.close()
    _log.info("copies by kernel: %s", crossover.as_json())
    return crossover
