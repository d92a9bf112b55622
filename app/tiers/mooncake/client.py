"""A client of Mooncake Store, as a process of its own.

The client's library holds the interpreter's lock while it connects and closes, for seconds, and cannot be interrupted.
In a process of its own it neither stops the engine's threads nor ends the engine. Blocks pass through a shared buffer,
which the client sends from and receives into. The buffer has a part for each call that may be under way, a *lane*.
The client may write into a lane for as long as a call has not ended, and after a failed one: bytes are verified after
they have been copied out of it.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.mooncake.settings import MooncakeTierSettings
from kvferry.app.tiers.shared_values import SettingsRefused

_log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("client_process.py")
_CLOSE_S = 5.0
_GRACE_S = 1.0
"""Seconds beyond `io_timeout_s` in which the client reports that a call has taken too long."""
_LOOK_S = 0.05
SCRATCH_BYTES = 1 << 20
"""First bytes of a lane, for the state of the namespace. Blocks lie behind them."""
_HUNG_S = 90.0
"""Seconds after which the client has given up each transfer, so that a process in which all calls hang is replaced."""
_LOG_LEVEL = "MC_LOG_LEVEL"
"""Variable of the environment with which the library's log is wanted."""
_SETUPS = 3
"""Attempts to set the client up, which also fail if another process takes its port."""

NO_SPACE = -200
ABSENT = (-704, -703, -707, -712)
"""Codes of objects that do not exist, are being stored, lost their lease during the call, or have lost their copies."""
NOT_FOUND = -704
TOO_LONG = -600
_USUAL = (NOT_FOUND, NO_SPACE)
"""Codes that are not logged: blocks that are not there, and a store that is full, which is reported otherwise."""
_NO_ANSWER = {-900: "the master cannot be reached", -901: "the master did not answer in time"}
_ENDED = "the client's process has ended"
_LATE = "the client did not answer in time"


class Lane:
    """One call at a time, with a part of the shared buffer. Raises `StoreUnavailable`."""

    def __init__(
        self,
        connection: Connection,
        view: memoryview,
        start: int,
        limit_s: float,
        on_codes: Callable[[str, Counter[int]], None],
    ) -> None:
        """`on_codes` is called with the name of a call, and how often it returned which codes that may need a look."""
        self._connection = connection
        self.view = view
        self._start = start
        self._limit_s = limit_s
        self._on_codes = on_codes
        self.late_since_s: float | None = None
        """When a call was given up that has not ended."""

    def is_free(self) -> bool:
        """Return whether no call is under way, after receiving the late answer to one."""
        if self.late_since_s is not None:
            try:
                if not self._connection.poll(0):
                    return False
                self._connection.recv()
            except (EOFError, OSError):
                return False
            self.late_since_s = None
        return True

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which objects exist. Their hosts keep them for the seconds of a lease."""
        return [code == 1 for code in self._call("exists", list(names))] if names else []

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects, also those that are being read; return codes."""
        return self._call("remove", list(names)) if names else []

    def remove_matching(self, pattern: str) -> int:
        """Remove objects whose names match a regular expression; return their number.

        Those that were looked up within the seconds of a lease remain.
        """
        (count,) = self._check([self._ask("remove_matching", pattern)])
        if count < 0:
            raise StoreUnavailable("the master refused a call", is_transient=False)
        return count

    def put(self, names: Sequence[str], spans: Sequence[tuple[int, int]], replicas: int, *, pinned: bool) -> list[int]:
        """Store parts of `view`, by start and length, as objects that do not exist; return codes.

        The code is 0 also for an object that exists, which is not changed. Pinned objects are never evicted.
        """
        starts, sizes = self._places(spans)
        return self._call("put", list(names), starts, sizes, replicas, pinned)

    def get(self, names: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[int]:
        """Read objects into parts of `view`; return their lengths, or negative codes."""
        return self._call("get", list(names), *self._places(spans))

    def close(self) -> None:
        """Close the connection, upon which the process serves it no more."""
        self._connection.close()

    def _places(self, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        return [self._start + start for start, _ in spans], [length for _, length in spans]

    def _call(self, name: str, names: list[str], *args: Any) -> list[int]:
        codes = self._check(self._ask(name, names, *args))
        if len(codes) != len(names):
            raise StoreUnavailable("the client failed", is_transient=False)
        unusual = Counter(code for code in codes if code < 0 and code not in _USUAL)
        if unusual:
            self._on_codes(name, unusual)
        return codes

    def _ask(self, *call: Any) -> Any:
        try:
            self._connection.send(call)
            if not self._connection.poll(self._limit_s):
                self.late_since_s = time.monotonic()
                raise StoreUnavailable(_LATE, is_transient=False)
            return self._connection.recv()
        except (EOFError, OSError):
            raise StoreUnavailable(_ENDED) from None

    @staticmethod
    def _check(codes: Any) -> list[int]:
        """Return the codes of a call. Raises `StoreUnavailable` if the master has not answered it."""
        if not isinstance(codes, list) or not all(isinstance(code, int) for code in codes):
            raise StoreUnavailable("the client failed", is_transient=False)
        for code in codes:
            if code in _NO_ANSWER:
                # The client has tried several times.
                raise StoreUnavailable(_NO_ANSWER[code], is_transient=False)
        return codes


class MooncakeClient:
    """The process, and the lanes of its calls. `start` is called on one thread at a time, `lane` on any."""

    def __init__(self, settings: MooncakeTierSettings, num_lanes: int, lane_bytes: int) -> None:
        """Start nothing. A lane has `lane_bytes` for blocks."""
        self._settings = settings
        self._num_lanes = num_lanes
        self.lane_bytes = SCRATCH_BYTES + -(-lane_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._lanes: list[Lane] = []
        self._free: list[Lane] = []
        self._changed = threading.Condition()
        self._limited_log = RateLimitedLogger(_log)

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Yield a lane that is free. Raises `StoreUnavailable` if there is none for too long."""
        lane = self._take()
        try:
            yield lane
        finally:
            with self._changed:
                if lane in self._lanes:
                    self._free.append(lane)
                    self._changed.notify()

    def start(self) -> None:
        """Make sure that the process runs. Raises `StoreUnavailable`, or `SettingsRefused`."""
        own_host = self._reach_master()
        if self._process is not None and self._process.poll() is None and not self._is_hung():
            return
        if self._process is not None:
            _log.warning("tier %s: the client's process is started again", self._settings.name)
        self.close()
        began_s = time.monotonic()
        code = self._spawn(self._settings.host or own_host)
        if code == 0:
            return
        has_ended = self._process is not None and self._process.poll() is not None
        self.close()
        if code is None and has_ended:
            raise StoreUnavailable(_ENDED, is_transient=False)
        if code is not None and time.monotonic() - began_s < self._settings.io_timeout_s:
            raise SettingsRefused(
                "the client cannot be set up: see metadata, protocol, devices and host, and that master and client "
                "are of the same version",
                is_transient=False,
            )
        raise StoreUnavailable("the master did not answer in time", is_transient=False)

    def close(self) -> None:
        """End the process. May be called again."""
        with self._changed:
            lanes, self._lanes, self._free = self._lanes, [], []
        for lane in lanes:
            lane.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._settings.segment_bytes is None:
                # The master has nothing of it that would have to be returned.
                self._process.kill()
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    # --- inside -------------------------------------------------------------------------------------------------

    def _reach_master(self) -> str:
        """Return the address of this host from which the master is reached. Raises `StoreUnavailable`."""
        try:
            with closing(socket.create_connection(self._settings.address, self._settings.connect_timeout_s)) as reached:
                own: str = reached.getsockname()[0]
                return own
        except TimeoutError:
            raise StoreUnavailable(_NO_ANSWER[-901], is_transient=False) from None
        except (OSError, UnicodeError):
            raise StoreUnavailable(_NO_ANSWER[-900]) from None

    def _is_hung(self) -> bool:
        """Return whether no call has ended for too long."""
        with self._changed:
            since_s = [lane.late_since_s for lane in self._lanes if not lane.is_free()]
        now_s = time.monotonic()
        return len(since_s) == len(self._lanes) and all(one is not None and now_s - one > _HUNG_S for one in since_s)

    def _spawn(self, own_host: str) -> int | None:
        """Start the process, and return the result of the client's setup; None if there was none in time."""
        settings = self._settings
        num_bytes = self._num_lanes * self.lane_bytes
        pairs = [Pipe() for _ in range(1 + self._num_lanes)]
        theirs = [pair[1].fileno() for pair in pairs]
        shared = os.memfd_create("kvferry-mooncake")
        try:
            os.ftruncate(shared, num_bytes)
            view = memoryview(mmap.mmap(shared, num_bytes))
            # No buffer of the client's own: all bytes pass through the shared one.
            setup = [own_host, settings.metadata.get_secret_value(), settings.segment_bytes or 0, 0]
            setup += [settings.protocol.value, settings.devices or "", settings.master]
            given = {"setup": setup, "buffer": shared, "bytes": num_bytes, "connections": theirs}
            self._process = subprocess.Popen(  # nosec B603 # a program of this package, without a shell
                [sys.executable, "-P", str(_PROGRAM), json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The library logs addresses, and a line for each block that finds no space.
                stderr=None if _LOG_LEVEL in os.environ else subprocess.DEVNULL,
                env=self._environment(),
                pass_fds=[shared, *theirs],
                # A signal to the engine's group does not end it before the engine.
                start_new_session=True,
            )
        finally:
            os.close(shared)
            for _, their in pairs:
                their.close()
        self._control = pairs[0][0]
        limit_s = settings.io_timeout_s + _GRACE_S
        size = self.lane_bytes
        lanes = [
            Lane(own, view[number * size : (number + 1) * size], number * size, limit_s, self._log_codes)
            for number, (own, _) in enumerate(pairs[1:])
        ]
        with self._changed:
            self._lanes, self._free = lanes, list(lanes)
        code: int | None = None
        with suppress(EOFError, OSError):
            if self._control.poll(_SETUPS * limit_s + settings.connect_timeout_s):
                code = self._control.recv()
        return code

    def _log_codes(self, call: str, codes: Counter[int]) -> None:
        """Log codes of single blocks, with which operators find the cause in Mooncake's documentation. Thread: any."""
        for code, count in codes.items():
            level = logging.INFO if code in ABSENT else logging.WARNING
            text = "tier %s: code of Mooncake in %s: %d, objects: %d"
            self._limited_log.log(level, f"{call} {code}", text, self._settings.name, call, code, count)

    def _environment(self) -> dict[str, str]:
        """Return the environment of the process, in which the library finds the time limits of its calls."""
        settings = self._settings
        seconds = str(math.ceil(settings.io_timeout_s))
        limits = {
            "MC_RPC_TIMEOUT_MS": str(math.ceil(settings.io_timeout_s * 1000)),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(settings.connect_timeout_s * 1000)),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
            "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
            "MC_STORE_CLIENT_SETUP_RETRIES": str(_SETUPS),
        }
        return {"MC_STORE_CLIENT_METRIC": "0"} | os.environ | limits

    def _take(self) -> Lane:
        deadline_s = time.monotonic() + self._settings.io_timeout_s
        with self._changed:
            while True:
                for place, lane in enumerate(self._free):
                    if lane.is_free():
                        return self._free.pop(place)
                if not self._lanes:
                    raise StoreUnavailable("the client is not set up")
                if time.monotonic() >= deadline_s:
                    raise StoreUnavailable(_LATE, is_transient=False)
                # A lane whose call ends late notifies no thread.
                self._changed.wait(_LOOK_S)
