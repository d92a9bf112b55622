"""A CUDA driver that is C functions over this process's memory: streams whose work runs late and in any order.

It really moves the bytes, keeps to streams and events and to nothing else, and can be told to fail. Everything is
behind the addresses that it hands out, so whoever calls it has to pass what a driver expects.
"""

from __future__ import annotations

import ctypes
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from kvferry.cuda_ops.cuda.driver import MemcpyAttributes
from tests.harness.waiting import DEADLINE_S

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
ALREADY_REGISTERED = 712
CAPTURE_UNSUPPORTED = 900
ILLEGAL_ADDRESS = 700
NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    ALREADY_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
}
ORDER_STREAM, ORDER_ANY = 1, 3
LEAST, GREATEST = 3, -5

OUT_INT, OUT_POINTER = POINTER(c_int), POINTER(c_void_p)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (OUT_INT, c_int),
    "cuDriverGetVersion": (OUT_INT,),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (OUT_INT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (OUT_POINTER, c_int),
    "cuDevicePrimaryCtxRelease": (c_int,),
    "cuCtxPushCurrent": (c_void_p,),
    "cuCtxPopCurrent": (OUT_POINTER,),
    "cuCtxGetStreamPriorityRange": (OUT_INT, OUT_INT),
    "cuStreamCreateWithPriority": (OUT_POINTER, c_uint, c_int),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (OUT_INT,),
    "cuEventCreate": (OUT_POINTER, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy": (c_void_p,),
    "cuMemHostRegister": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemAlloc": (POINTER(c_uint64), c_size_t),
    "cuMemFree": (c_uint64,),
    "cuMemHostAlloc": (OUT_POINTER, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyBatchAsync": (
        POINTER(c_uint64),
        POINTER(c_uint64),
        POINTER(c_size_t),
        c_size_t,
        POINTER(MemcpyAttributes),
        POINTER(c_size_t),
        c_size_t,
        POINTER(c_size_t),
        c_void_p,
    ),
}
WITHOUT_CONTEXT = ("cuInit", "cuGetErrorName", "cuDriver", "cuDevice", "cuCtxPush", "cuCtxPop")
"""Beginnings of their names."""
# What a thread may not do while another one captures a graph, unless it said that it stands beside that.
UNSAFE_IN_CAPTURES = {"cuEventSynchronize", "cuStreamSynchronize", "cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister"}
CAPTURE_GLOBAL = 0


@dataclass
class Event:
    """`recorded` counts what it was recorded for, `happened` up to where that has ended."""

    flags: int
    recorded: int = 0
    happened: int = 0
    time_ms: float = 0.0


@dataclass
class Copies:
    """Copies that may run in any order; one step does one of them."""

    left: list[tuple[int, int, int]]


@dataclass
class Stream:
    flags: int
    priority: int
    work: deque[Any] = field(default_factory=deque)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class FakeCuda:
    """A driver with batch copies or without.

    `batches` are those that it was given, as stream and count; `compute` is a stream that exists from the start;
    `time_ms` is what the device's clock shows. `reaches_pinned` is whether the device has registered memory where the
    host has it. With `pageable_waits` a single copy of unregistered memory returns once it has run, as a driver's may.
    """

    def __init__(
        self, seed: int = 0, *, batches: bool = True, reaches_pinned: bool = True, pageable_waits: bool = False
    ) -> None:
        self.has_batches = batches
        self._pageable_waits = pageable_waits
        self.reaches_pinned = reaches_pinned
        self.calls: Counter[str] = Counter()
        self.batches: list[tuple[int, int]] = []
        self.attributes: list[tuple[int, int]] = []
        self.allocated: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.retained = 0
        self.compute = 7
        self._streams: dict[int, Stream] = {self.compute: Stream(0, 0)}
        self._events: dict[int, Event] = {}
        self._next_handle = 100
        self._random = random.Random(seed)
        self.time_ms = 0.0
        self._changed = threading.Condition(threading.RLock())
        self._held = False
        self._capturing = False
        self._contexts = threading.local()
        self._failures: dict[str, deque[tuple[int, int]]] = {}
        self._sticky = 0
        self._kept: list[Any] = []
        self._functions = {
            name: ctypes.CFUNCTYPE(c_int, *arguments)(self._guarded(name))
            for name, arguments in SIGNATURES.items()
            if batches or name != "cuMemcpyBatchAsync"
        }

    # ---- what a test does --------------------------------------------------------------------------------------------

    def resolve(self, name: str, _version: int) -> int:
        """As `cuGetProcAddress`."""
        function = self._functions.get(name)
        return 0 if function is None else ctypes.cast(function, c_void_p).value or 0

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue compute on the compute stream."""
        with self._changed:
            self._streams[self.compute].work.append(kernel)

    def queue(self, stream: int, work: Callable[[], object]) -> None:
        """Queue anything on a stream, as a kernel is."""
        with self._changed:
            self._streams[stream].work.append(work)

    @contextmanager
    def held(self) -> Any:
        """No compute makes progress meanwhile."""
        with self._changed:
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Any:
        """A graph is being captured meanwhile, which any thread may spoil."""
        with self._changed:
            self._capturing = True
        try:
            yield
        finally:
            with self._changed:
                self._capturing = False

    def synchronize(self) -> None:
        """Run everything on the compute stream."""
        with self._changed:
            self._run_until(lambda: not self._streams[self.compute].work)

    def fail(self, name: str, code: int, after: int = 0) -> None:
        """Have a later call of a function fail, once; copies of a failing batch are queued in part."""
        with self._changed:
            self._failures.setdefault(name, deque()).append((self.calls[name] + after + 1, code))

    def poison(self, code: int) -> None:
        """What a kernel's fault does: nothing runs any more, and every call fails."""
        with self._changed:
            self._sticky = code
            for stream in self._streams.values():
                stream.work.clear()
            self._changed.notify_all()

    def num_queued_copies(self) -> int:
        """Copies that have not run."""
        with self._changed:
            return sum(len(work.left) for s in self._streams.values() for work in s.work if isinstance(work, Copies))

    @property
    def copy_streams(self) -> list[Stream]:
        """All but the compute stream."""
        return [stream for handle, stream in self._streams.items() if handle != self.compute]

    @property
    def num_events(self) -> int:
        """Events that have not been destroyed."""
        return len(self._events)

    # ---- what the device does ----------------------------------------------------------------------------------------

    def _run_until(self, done: Callable[[], bool]) -> None:
        while not done() and not self._sticky:
            if not self._step():
                self._changed.wait(DEADLINE_S)

    def _step(self) -> bool:
        """Do one thing that may be done now; whether there was one."""
        able = [handle for handle, stream in self._streams.items() if stream.work and self._may_start(handle)]
        if not able:
            return False
        handle = self._random.choice(able)
        work = self._streams[handle].work
        head = work[0]
        self.time_ms += self._random.uniform(0.001, 1.0)
        if isinstance(head, Copies):
            target, source, size = head.left.pop(self._random.randrange(len(head.left)))
            ctypes.memmove(target, source, size)
            if not head.left:
                work.popleft()
        elif isinstance(head, tuple):
            work.popleft()
            if head[0] == "record":
                event, number = head[1:]
                event.happened, event.time_ms = number, self.time_ms
        else:
            work.popleft()
            head()
        self._changed.notify_all()
        return True

    def _may_start(self, handle: int) -> bool:
        head = self._streams[handle].work[0]
        if isinstance(head, tuple) and head[0] == "wait":
            return bool(head[1].happened >= head[2])
        return not (self._held and handle == self.compute)

    # ---- the driver's functions --------------------------------------------------------------------------------------

    def _guarded(self, name: str) -> Callable[..., int]:
        function = getattr(self, "_" + _snake(name))

        def call(*arguments: Any) -> int:
            with self._changed:
                self.calls[name] += 1
                if name == "cuGetErrorName":
                    return function(*arguments)
                if self._sticky:
                    return self._sticky
                if not name.startswith(WITHOUT_CONTEXT) and not getattr(self._contexts, "stack", None):
                    return INVALID_CONTEXT
                mode = getattr(self._contexts, "capture_mode", CAPTURE_GLOBAL)
                if self._capturing and name in UNSAFE_IN_CAPTURES and mode == CAPTURE_GLOBAL:
                    return CAPTURE_UNSUPPORTED
                for _ in range(self._random.randrange(3)):
                    self._step()
                failures = self._failures.get(name)
                if failures and failures[0][0] <= self.calls[name]:
                    code = failures.popleft()[1]
                    if name == "cuMemcpyBatchAsync":
                        self._batch(*arguments, until=int(arguments[3]) // 2)
                        arguments[7][0] = int(arguments[3]) // 2
                    return code
                return function(*arguments) or self._sticky

        return call

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _cu_init(self, _flags: int) -> int:
        return 0

    def _cu_get_error_name(self, code: int, out: Any) -> int:
        if code not in NAMES:
            return INVALID_VALUE
        out[0] = NAMES[code]
        return 0

    def _cu_device_get(self, out: Any, index: int) -> int:
        out[0] = index
        return 0 if index == 0 else 101

    def _cu_driver_get_version(self, out: Any) -> int:
        out[0] = 13020
        return 0

    def _cu_device_get_name(self, text: int, size: int, _device: int) -> int:
        ctypes.memmove(text, b"Fake\0"[:size], 5)
        return 0

    def _cu_device_get_attribute(self, out: Any, attribute: int, _device: int) -> int:
        if attribute != 91:
            return INVALID_VALUE
        out[0] = int(self.reaches_pinned)
        return 0

    def _cu_thread_exchange_stream_capture_mode(self, mode: Any) -> int:
        if mode[0] not in (0, 1, 2):
            return INVALID_VALUE
        before = getattr(self._contexts, "capture_mode", CAPTURE_GLOBAL)
        self._contexts.capture_mode, mode[0] = mode[0], before
        return 0

    def _cu_mem_alloc(self, out: Any, num_bytes: int, _flags: int = 0) -> int:
        memory = ctypes.create_string_buffer(num_bytes)
        out[0] = ctypes.addressof(memory)
        self.allocated[out[0]] = memory
        return 0

    def _cu_mem_free(self, address: int) -> int:
        return 0 if self.allocated.pop(address, None) is not None else INVALID_VALUE

    _cu_mem_host_alloc, _cu_mem_free_host = _cu_mem_alloc, _cu_mem_free

    def _cu_device_get_pcibus_id(self, text: int, size: int, _device: int) -> int:
        ctypes.memmove(text, b"0000:3B:00.0\0"[:size], 13)
        return 0

    def _cu_device_primary_ctx_retain(self, out: Any, _device: int) -> int:
        self.retained += 1
        out[0] = 55
        return 0

    def _cu_device_primary_ctx_release(self, _device: int) -> int:
        self.retained -= 1
        return 0

    def _cu_ctx_push_current(self, context: int) -> int:
        self._contexts.stack = [*getattr(self._contexts, "stack", []), context]
        return 0

    def _cu_ctx_pop_current(self, out: Any) -> int:
        if not getattr(self._contexts, "stack", None):
            return INVALID_CONTEXT
        out[0] = self._contexts.stack.pop()
        return 0

    def _cu_ctx_get_stream_priority_range(self, least: Any, greatest: Any) -> int:
        least[0], greatest[0] = LEAST, GREATEST
        return 0

    def _cu_stream_create_with_priority(self, out: Any, flags: int, priority: int) -> int:
        out[0] = handle = self._handle()
        self._streams[handle] = Stream(flags, priority)
        return 0

    def _cu_stream_wait_event(self, stream: int, event: int, _flags: int) -> int:
        if stream not in self._streams or event not in self._events:
            return INVALID_HANDLE
        waited = self._events[event]
        self._streams[stream].work.append(("wait", waited, waited.recorded))
        return 0

    def _cu_stream_synchronize(self, stream: int) -> int:
        if stream not in self._streams:
            return INVALID_HANDLE
        self._run_until(lambda: not self._streams[stream].work)
        return 0

    def _cu_stream_destroy(self, stream: int) -> int:
        return 0 if self._streams.pop(stream, None) else INVALID_HANDLE

    def _cu_event_create(self, out: Any, flags: int) -> int:
        out[0] = handle = self._handle()
        self._events[handle] = Event(flags)
        return 0

    def _cu_event_record(self, event: int, stream: int) -> int:
        if stream not in self._streams or event not in self._events:
            return INVALID_HANDLE
        recorded = self._events[event]
        recorded.recorded += 1
        self._streams[stream].work.append(("record", recorded, recorded.recorded))
        return 0

    def _cu_event_synchronize(self, event: int) -> int:
        if event not in self._events:
            return INVALID_HANDLE
        waited = self._events[event]
        number = waited.recorded
        self._run_until(lambda: waited.happened >= number)
        return 0

    def _cu_event_elapsed_time(self, out: Any, start: int, end: int) -> int:
        first, second = self._events[start], self._events[end]
        if first.flags & 2 or second.flags & 2 or not first.happened or not second.happened:
            return INVALID_HANDLE
        out[0] = second.time_ms - first.time_ms
        return 0

    def _cu_event_destroy(self, event: int) -> int:
        return 0 if self._events.pop(event, None) else INVALID_HANDLE

    def _cu_mem_host_register(self, address: int, num_bytes: int, _flags: int) -> int:
        if address in self.registered:
            return ALREADY_REGISTERED
        self.registered[address] = num_bytes
        return 0

    def _cu_mem_host_unregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else INVALID_VALUE

    def _cu_memcpy_async(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        if stream not in self._streams:
            return INVALID_HANDLE
        work = self._streams[stream].work
        work.append(Copies([(target, source, num_bytes)]))
        if self._pageable_waits and not self._is_registered(target, source):
            self._run_until(lambda: not work)
        return 0

    def _cu_memcpy_batch_async(self, *arguments: Any) -> int:
        targets, sources, _, count, attributes, firsts, num_attributes, _, stream = arguments
        if not stream or stream not in self._streams or not count or num_attributes != 1 or firsts[0] != 0:
            return INVALID_VALUE
        self.attributes.append((attributes[0].src_access_order, attributes[0].flags))
        if not self.reaches_pinned and any(self._is_registered(targets[i], sources[i]) for i in range(count)):
            self.poison(ILLEGAL_ADDRESS)
            return 0
        self._batch(*arguments, until=count)
        return 0

    def _is_registered(self, *addresses: int) -> bool:
        return any(at <= address < at + size for address in addresses for at, size in self.registered.items())

    def _batch(
        self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, *rest: Any, until: int
    ) -> None:
        """Queue the first `until` copies of a batch on its stream, the last of the arguments."""
        copies = [(targets[i], sources[i], sizes[i]) for i in range(until)]
        self.batches.append((rest[-1], count))
        if not copies:
            return
        if attributes[0].src_access_order == ORDER_ANY:
            # Such a copy may read its source at once.
            kept = [ctypes.create_string_buffer(ctypes.string_at(source, size), size) for _, source, size in copies]
            copies = [(t, ctypes.addressof(k), size) for (t, _, size), k in zip(copies, kept, strict=True)]
            self._kept += kept
        self._streams[rest[-1]].work.append(Copies(copies))
