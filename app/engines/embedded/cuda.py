"""A CUDA device's part in offloading: pool memory that it knows, near it, and the copy engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cuda_ops.cuda_copy import CudaCopyEngine
from cuda_ops.driver import CudaDriver, CudaError, CudaUnavailable, load_driver
from cuda_ops.host_pool import HostPool
from cuda_ops.layout import DeviceLayout
from cuda_ops.movers import choose_mover
from cuda_ops.numa import node_of_pci_device
from cuda_ops.prepare import Preparation
from cuda_ops.registrar import CudaRegistrar


class CudaSide:
    """For one device, from before the pool is mapped until after it is gone."""

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        """Raises `CudaUnavailable`. `driver` is this machine's by default."""
        self._device = device
        self._index = device.index or 0
        try:
            self._driver = load_driver() if driver is None else driver
            self._registrar = CudaRegistrar(self._driver, self._index)
            self._pci_address = self._driver.pci_address(self._driver.device(self._index))
        except CudaError as error:
            raise CudaUnavailable(f"DEVICE: {device} cannot be used for copies ({error}); set DEVICE=cpu") from error

    def preparation(self) -> Preparation:
        """How the host pool is made ready: near the device, and in large pages where the kernel has them, of which
        there are fewer to pin."""
        return Preparation(registrar=self._registrar, numa_node=node_of_pci_device(self._pci_address), huge_pages=True)

    def copies(
        self,
        layout: DeviceLayout,
        pool: HostPool,
        on_finished: Callable[[], None],
        crossover_file: Path,
        kernel_below_bytes: int | None = None,
    ) -> CudaCopyEngine:
        """A copy engine between the device's blocks and the pool; see `choose_mover`. Raises `CudaUnavailable`."""
        try:
            mover = choose_mover(self._driver, self._index, pool, crossover_file, kernel_below_bytes)
            return CudaCopyEngine(
                layout,
                pool,
                on_finished,
                driver=self._driver,
                device=self._index,
                current_stream=lambda: int(torch.cuda.current_stream(self._device).cuda_stream),
                mover=mover,
            )
        except CudaError as error:
            raise CudaUnavailable(f"DEVICE: no copy engine on {self._device} ({error}); set DEVICE=cpu") from error

    def close(self) -> None:
        """After the pool."""
        self._registrar.close()
