"""CUDA support for any engine: registered pool memory and a copy engine for one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kvferry.core.transfers import TransferJob
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.cuda.crossover import choose_mover
from kvferry.cuda_ops.cuda.cuda_copy import ComputeDevice, CudaCopyEngine
from kvferry.cuda_ops.cuda.driver import CudaDriver, CudaError, CudaUnavailable, load_driver
from kvferry.cuda_ops.cuda.registrar import CudaRegistrar
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import Preparation
from kvferry.cuda_ops.pool.processors import node_of_pci_device

CROSSOVER_FILE = "copy-crossover.json"


class CudaDevice:
    """Pool preparation and copy engine of one device; outlives the pool."""

    def __init__(
        self,
        device: torch.device,
        driver: CudaDriver | None = None,
        current_stream: Callable[[], int] | None = None,
        *,
        alternative: str = "set KVFERRY_DEVICE=cpu",
    ) -> None:
        """Load the driver and register with the device.

        Args:
            alternative: end of the error messages: what the user can do instead.
            driver: this machine's by default.
            current_stream: returns the calling thread's compute stream; torch's by default.

        Raises:
            CudaUnavailable: no usable driver or device.
        """
        self._device = device
        self._alternative = alternative
        current_stream = current_stream or (lambda: int(torch.cuda.current_stream(device).cuda_stream))
        index = device.index or 0
        try:
            driver = load_driver() if driver is None else driver
            self._compute = ComputeDevice(driver, index, current_stream)
            self._registrar = CudaRegistrar(driver, index)
            self._pci_address = driver.pci_address(driver.device(index))
        except (CudaError, CudaUnavailable) as error:
            raise self._unavailable("cannot be used for copies", error) from error

    def preparation(self) -> Preparation:
        """Return how the host pool is prepared: near the device, in huge pages, which pin faster, where available."""
        return Preparation(registrar=self._registrar, numa_node=node_of_pci_device(self._pci_address), huge_pages=True)

    def copies(
        self,
        layout: DeviceLayout,
        pool: HostPool,
        on_finished: Callable[[], None],
        state_dir: Path,
        kernel_below_bytes: int | None = None,
        before: Callable[[TransferJob], None] | None = None,
        worker: int | None = None,
    ) -> CudaCopyEngine:
        """Return a copy engine between the device's blocks and the pool; see `choose_mover` and `CudaCopyEngine`.

        Results name `worker`, by default the pool's rank. Raises `CudaUnavailable`.
        """
        try:
            compute = self._compute
            mover = choose_mover(compute.driver, compute.index, pool, state_dir / CROSSOVER_FILE, kernel_below_bytes)
            return CudaCopyEngine(
                layout,
                pool,
                on_finished,
                compute,
                worker=pool.rank if worker is None else worker,
                mover=mover,
                before=before,
            )
        except CudaError as error:
            raise self._unavailable("gives no copy engine", error) from error

    def close(self) -> None:
        """Release the device. Must be called after the pool is closed."""
        self._registrar.close()

    def _unavailable(self, what: str, error: Exception) -> CudaUnavailable:
        return CudaUnavailable(f"{self._device} {what} ({error}); {self._alternative}")
