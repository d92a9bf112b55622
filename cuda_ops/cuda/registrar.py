"""Registration of host memory with a CUDA device, so that its copy engines access it directly."""

from __future__ import annotations

import logging

from kvferry.cuda_ops.cuda.driver import CudaDriver, CudaError

_log = logging.getLogger(__name__)


class CudaRegistrar:
    """A `HostRegistrar`."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        """Retain the device's context. Raises `CudaError`.

        Args:
            driver: the CUDA driver.
            device: index as torch counts devices.
        """
        self._driver = driver
        self._device = driver.device(device)
        self._context = driver.retain_context(self._device)

    def register(self, address: int, num_bytes: int) -> None:
        """See `HostRegistrar`."""
        try:
            with self._driver.current(self._context):
                self._driver.register_host(address, num_bytes)
        except CudaError as error:
            raise OSError(str(error)) from error

    def unregister(self, address: int) -> None:
        """See `HostRegistrar`."""
        try:
            with self._driver.current(self._context):
                self._driver.unregister_host(address)
        except CudaError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Release the device's context. An unusable device may refuse, which is logged."""
        try:
            self._driver.release_context(self._device)
        except CudaError as error:
            _log.warning("CUDA device not released: %s", error)
