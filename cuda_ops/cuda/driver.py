"""CUDA driver calls used for copying, called with plain numbers through ctypes.

NVIDIA's bindings, which only supply the functions' addresses, take lists of objects. The descriptors of a job are
arrays of up to a hundred thousand numbers, which are passed to the driver as they are in memory. Handles, addresses and
sizes are `int`. Every call releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from kvferry.core.errors import StartError
from kvferry.cuda_ops.copy.segments import Int64s

Resolve = Callable[[str, int], int]
"""Returns a function's address, or 0 if the driver lacks it.

Arguments: the function's name, and the CUDA version of the calling convention (12080 is 12.8).
"""

_OUT = c_void_p
_HANDLE = c_void_p
_BASE_VERSION = 12000
_BATCH_VERSION = 12080
_BATCH = "cuMemcpyBatchAsync"
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (_OUT, c_int),
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (_OUT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuDevicePrimaryCtxRelease": (c_int,),
    "cuCtxPushCurrent": (_HANDLE,),
    "cuCtxPopCurrent": (_OUT,),
    "cuCtxGetStreamPriorityRange": (_OUT, _OUT),
    "cuStreamCreateWithPriority": (_OUT, c_uint, c_int),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamDestroy": (_HANDLE,),
    "cuThreadExchangeStreamCaptureMode": (_OUT,),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (_OUT, _HANDLE, _HANDLE),
    "cuEventDestroy": (_HANDLE,),
    "cuMemHostRegister": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemAlloc": (_OUT, c_size_t),
    "cuMemFree": (c_uint64,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, _HANDLE),
}
"""Functions of every CUDA 12 driver, with the types of their arguments."""
# The convention of CUDA 12.8, which later drivers support: unlike newer ones it returns the index of the failed copy.
_BATCH_ARGUMENTS = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, _HANDLE)

_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC = 1
_EVENT_DISABLE_TIMING = 2
_HOST_PORTABLE_AND_MAPPED = 1 | 2
_SRC_ACCESS_ORDER_STREAM = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_NO_INDEX = 2**64 - 1
_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEMORY = 91
_CAPTURE_MODE_RELAXED = 2
# Context lost: not initialized, deinitialized, no such context or handle, uncorrectable memory or link error, contained
# error, kernel or hardware fault. Every later call fails likewise.
_FATAL_CODES = frozenset({3, 4, 201, 214, 220, 226, 400, 700, 702, 709, 710, *range(714, 720), 721, 810, 911, 999})


class CudaUnavailable(StartError):
    """The CUDA driver or device is missing. The message says which, and what to do."""


class CudaError(RuntimeError):
    """A failed driver call, with the function's name in `call` and the driver's code in `code`."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call} failed: {name} ({code}){detail}")
        self.call = call
        self.code = code

    @property
    def is_fatal(self) -> bool:
        """Return whether the context, and all work in it, is lost. After any other error queued work may still run."""
        return self.code in _FATAL_CODES


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: how the copies of a batch read their sources."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_location_type", c_int),
        ("src_location_id", c_int),
        ("dst_location_type", c_int),
        ("dst_location_id", c_int),
        ("flags", c_uint),
    )


class CudaDriver:
    """The CUDA driver. Any thread; some methods require a current context. Raises `CudaError`."""

    def __init__(self, resolve: Resolve) -> None:
        """Look up all functions. Raises `CudaUnavailable` if one that every CUDA 12 driver has is missing."""
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in FUNCTIONS.items():
            address = resolve(name, _BASE_VERSION)
            if not address:
                raise CudaUnavailable(f"CUDA driver lacks {name}: it is older than CUDA 12; update the driver")
            self._functions[name] = ctypes.CFUNCTYPE(c_int, *arguments)(address)
        batch = resolve(_BATCH, _BATCH_VERSION)
        self.has_batches = bool(batch)
        if batch:
            self._functions[_BATCH] = ctypes.CFUNCTYPE(c_int, *_BATCH_ARGUMENTS)(batch)
        # Sources must be read in stream order, after the compute that fills them. Any other order may read them
        # earlier.
        self._attributes = MemcpyAttributes(
            src_access_order=_SRC_ACCESS_ORDER_STREAM, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )
        self._first = c_size_t(0)
        self._call("cuInit", 0)

    # ---- devices and contexts ---------------------------------------------------------------------------------------

    def device(self, index: int) -> int:
        """Return the device handle of an index, counted as torch does."""
        device = c_int()
        self._call("cuDeviceGet", byref(device), index)
        return device.value

    def describe(self, device: int) -> str:
        """Return the device's name and the driver's version."""
        version, text = c_int(), ctypes.create_string_buffer(256)
        self._call("cuDriverGetVersion", byref(version))
        self._call("cuDeviceGetName", text, len(text), device)
        return f"{text.value.decode()}, driver {version.value // 1000}.{version.value % 1000 // 10}"

    def pci_address(self, device: int) -> str:
        """Return the device's PCI address, such as `0000:3b:00.0`."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode()

    def reaches_registered_memory(self, device: int) -> bool:
        """Return whether the device maps registered host memory at the host's address.

        Where it does not, kernels and batches that use the host's address crash the device; single copies are
        translated.
        """
        found = c_int()
        self._call("cuDeviceGetAttribute", byref(found), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEMORY, device)
        return bool(found.value)

    def retain_context(self, device: int) -> int:
        """Return the device's primary context, which torch uses too."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Undo `retain_context`."""
        self._call("cuDevicePrimaryCtxRelease", device)

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context current on this thread for the duration of the block."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent", byref(c_void_p()))

    # ---- streams and events: with a context current ------------------------------------------------------------------

    def create_stream(self) -> int:
        """Create a stream of the lowest priority that synchronizes with no other implicitly."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        self._call("cuStreamCreateWithPriority", byref(stream), _STREAM_NON_BLOCKING, least.value)
        return stream.value or 0

    def wait_event(self, stream: int, event: int) -> None:
        """Order later work of the stream after the work recorded in the event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_stream(self, stream: int) -> None:
        """Wait until all work of the stream has run."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream."""
        self._call("cuStreamDestroy", stream)

    def relax_capture_mode(self) -> None:
        """Allow this thread to call the driver while another thread captures a graph.

        Without it, waiting for an event during a capture fails and invalidates the capture.
        """
        self._call("cuThreadExchangeStreamCaptureMode", byref(c_int(_CAPTURE_MODE_RELAXED)))

    def create_event(self, *, timing: bool) -> int:
        """Create an event; threads that wait for it sleep instead of spinning."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _EVENT_BLOCKING_SYNC | (0 if timing else _EVENT_DISABLE_TIMING))
        return event.value or 0

    def record_event(self, event: int, stream: int) -> None:
        """Record the work that is on the stream now: the event completes when all of it has run."""
        self._call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Wait until an event has completed."""
        self._call("cuEventSynchronize", event)

    def elapsed_s(self, start: int, end: int) -> float:
        """Return the device time between two completed events created with `timing`."""
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy", event)

    # ---- memory: with a context current ------------------------------------------------------------------------------

    def register_host(self, address: int, num_bytes: int) -> None:
        """Lock pages of host memory and register it with every context."""
        self._call("cuMemHostRegister", address, num_bytes, _HOST_PORTABLE_AND_MAPPED)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        self._call("cuMemHostUnregister", address)

    def allocate(self, num_bytes: int) -> int:
        """Allocate device memory."""
        address = c_uint64()
        self._call("cuMemAlloc", byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Free device memory."""
        self._call("cuMemFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        """Allocate page-locked host memory."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), num_bytes, _HOST_PORTABLE_AND_MAPPED)
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Free page-locked host memory."""
        self._call("cuMemFreeHost", address)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between any two addresses."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """Queue copies that may run in any order among themselves and read their sources in stream order.

        The arrays are contiguous, of equal length, not empty. Requires: `has_batches`.
        """
        failed = c_size_t(_NO_INDEX)
        self._call(
            _BATCH,
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            byref(self._attributes),
            byref(self._first),
            1,
            byref(failed),
            stream,
            detail=lambda: "" if failed.value == _NO_INDEX else f" at copy {failed.value} of {len(sizes)}",
        )

    def _call(self, name: str, *arguments: Any, detail: Callable[[], str] = str) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise CudaError(name, code, self._name_of(code), detail())

    def _name_of(self, code: int) -> str:
        text = c_char_p()
        if self._functions["cuGetErrorName"](code, byref(text)) or text.value is None:
            return "unknown error"
        return text.value.decode()


def load_driver() -> CudaDriver:
    """Load this machine's CUDA driver. Raises `CudaUnavailable`."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(f"NVIDIA's Python bindings are missing ({error}): install cuda-bindings") from error

    def resolve(name: str, version: int) -> int:
        code, address, *_ = driver.cuGetProcAddress(name.encode(), version, 0)
        return 0 if int(code) else int(address or 0)

    try:
        return CudaDriver(resolve)
    except (RuntimeError, OSError) as error:
        raise CudaUnavailable(f"CUDA driver does not load ({error}): install the NVIDIA driver") from error
