"""The CUDA driver's calls that carry blocks: C functions that NVIDIA's own bindings find, given plain numbers.

The bindings take lists of objects, and the descriptors of a job are arrays of up to a hundred thousand numbers: those
go to the driver as they lie in memory. Handles, addresses and sizes are `int`. Every call lets other threads run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from kvferry.cuda_ops.segments import Int64s

Resolve = Callable[[str, int], int]
"""From a function's name and the CUDA version whose calling convention is wanted (12080 is 12.8) to its address; 0
where the driver has none."""

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
"""What every driver of CUDA 12 has, with the types of its arguments."""
# The convention of 12.8, which later drivers keep: it has the index of the copy that failed, the newer one has not.
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
# Not initialized, deinitialized, no such context or handle, uncorrectable memory or link, contained, and what a kernel
# or the hardware did: every later call fails likewise.
_NOTHING_RUNS = frozenset({3, 4, 201, 214, 220, 226, 400, 700, 702, 709, 710, *range(714, 720), 721, 810, 911, 999})


class CudaUnavailable(ValueError):
    """There is no CUDA driver or device to work with; the message says what is missing and what to do."""


class CudaError(RuntimeError):
    """A driver call failed: `call` and `code` say which and how."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call} failed: {name} ({code}){detail}")
        self.call = call
        self.code = code

    @property
    def ends_all(self) -> bool:
        """Whether it says that the context is lost, and with it whatever ran there. After any other error, what was
        queued may go on."""
        return self.code in _NOTHING_RUNS


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: how a batch's copies read their sources."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_location_type", c_int),
        ("src_location_id", c_int),
        ("dst_location_type", c_int),
        ("dst_location_id", c_int),
        ("flags", c_uint),
    )


class CudaDriver:
    """One driver. Any thread may call; what says so needs a context to be current on it. Raises `CudaError`."""

    def __init__(self, resolve: Resolve) -> None:
        """Look every function up. Raises `CudaUnavailable` where one is missing that every driver of CUDA 12 has."""
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in FUNCTIONS.items():
            address = resolve(name, _BASE_VERSION)
            if not address:
                raise CudaUnavailable(f"the CUDA driver has no {name}: it is older than CUDA 12; update it")
            self._functions[name] = ctypes.CFUNCTYPE(c_int, *arguments)(address)
        batch = resolve(_BATCH, _BATCH_VERSION)
        self.has_batches = bool(batch)
        if batch:
            self._functions[_BATCH] = ctypes.CFUNCTYPE(c_int, *_BATCH_ARGUMENTS)(batch)
        # A source is read in stream order, which is behind the compute that fills it: with any other order the copy
        # may read it before.
        self._attributes = MemcpyAttributes(
            src_access_order=_SRC_ACCESS_ORDER_STREAM, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )
        self._first = c_size_t(0)
        self._call("cuInit", 0)

    # ---- devices and contexts ---------------------------------------------------------------------------------------

    def device(self, index: int) -> int:
        """The device of an index, counted as torch does."""
        device = c_int()
        self._call("cuDeviceGet", byref(device), index)
        return device.value

    def describe(self, device: int) -> str:
        """The device's name and the driver's version."""
        version, text = c_int(), ctypes.create_string_buffer(256)
        self._call("cuDriverGetVersion", byref(version))
        self._call("cuDeviceGetName", text, len(text), device)
        return f"{text.value.decode()}, driver {version.value // 1000}.{version.value % 1000 // 10}"

    def pci_address(self, device: int) -> str:
        """Such as `0000:3b:00.0`."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode()

    def reaches_registered_memory(self, device: int) -> bool:
        """Whether the device has registered host memory at the address that the host has it at. Where it has not,
        kernels and batches that are given that address break the device; single copies are translated."""
        found = c_int()
        self._call("cuDeviceGetAttribute", byref(found), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEMORY, device)
        return bool(found.value)

    def retain_context(self, device: int) -> int:
        """The context that torch, too, uses on this device."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Undo `retain_context`."""
        self._call("cuDevicePrimaryCtxRelease", device)

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context current on this thread, and afterwards the one that was."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent", byref(c_void_p()))

    # ---- streams and events: with a context current ------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream of the lowest priority, which waits for no other by itself."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        self._call("cuStreamCreateWithPriority", byref(stream), _STREAM_NON_BLOCKING, least.value)
        return stream.value or 0

    def wait_event(self, stream: int, event: int) -> None:
        """Whatever the stream gets from now on starts when what was recorded before the event has ended."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_stream(self, stream: int) -> None:
        """Wait until the stream has done everything."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """Of no use any more."""
        self._call("cuStreamDestroy", stream)

    def stand_beside_captures(self) -> None:
        """From now on this thread may do anything while another one captures a graph. Otherwise waiting for an event
        fails meanwhile, and ruins the capture."""
        self._call("cuThreadExchangeStreamCaptureMode", byref(c_int(_CAPTURE_MODE_RELAXED)))

    def create_event(self, *, timing: bool) -> int:
        """An event; whoever waits for it sleeps."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _EVENT_BLOCKING_SYNC | (0 if timing else _EVENT_DISABLE_TIMING))
        return event.value or 0

    def record_event(self, event: int, stream: int) -> None:
        """The event happens when everything that is on the stream now has ended."""
        self._call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Wait until it has happened."""
        self._call("cuEventSynchronize", event)

    def elapsed_s(self, start: int, end: int) -> float:
        """Device time between two events that have happened, made with `timing`."""
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    def destroy_event(self, event: int) -> None:
        """Of no use any more."""
        self._call("cuEventDestroy", event)

    # ---- memory: with a context current ------------------------------------------------------------------------------

    def register_host(self, address: int, num_bytes: int) -> None:
        """Lock host memory in place and make it known to every context."""
        self._call("cuMemHostRegister", address, num_bytes, _HOST_PORTABLE_AND_MAPPED)

    def unregister_host(self, address: int) -> None:
        """Undo it."""
        self._call("cuMemHostUnregister", address)

    def allocate(self, num_bytes: int) -> int:
        """Device memory."""
        address = c_uint64()
        self._call("cuMemAlloc", byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Give it back."""
        self._call("cuMemFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        """Host memory that the device knows."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), num_bytes, _HOST_PORTABLE_AND_MAPPED)
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Give it back."""
        self._call("cuMemFreeHost", address)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue one copy between any two places."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """Queue copies that may run in any order among themselves, and read their sources in stream order. Contiguous
        arrays of one length, which is not 0. Only where the driver `has_batches`."""
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
            return "an error without a name"
        return text.value.decode()


def load_driver() -> CudaDriver:
    """This machine's driver. Raises `CudaUnavailable`."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(
            f"copying on CUDA needs NVIDIA's Python bindings ({error}): install cuda-bindings"
        ) from error

    def resolve(name: str, version: int) -> int:
        code, address, *_ = driver.cuGetProcAddress(name.encode(), version, 0)
        return 0 if int(code) else int(address or 0)

    try:
        return CudaDriver(resolve)
    except (RuntimeError, OSError) as error:
        raise CudaUnavailable(f"the CUDA driver does not load or start ({error}): install it") from error
