"""Making host memory known to a CUDA device, so that its copy engines reach it without the processor's help."""

from __future__ import annotations

import logging

from kvferry.cuda_ops.driver import CudaDriver, CudaError

_log = logging.getLogger(__name__)


class CudaRegistrar:
    """A `HostRegistrar`."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        """For a device as torch counts them. Raises `CudaError`."""
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
        """Let go of the device; one that refuses is dead."""
        try:
            self._driver.release_context(self._device)
        except CudaError as error:
            _log.warning("the CUDA device was not given back: %s", error)
