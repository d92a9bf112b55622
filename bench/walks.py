"""Code walks: how many calls and files a reader follows through one operation, counted by tracing the real code.

Run: python -m bench.walks [--show "match, hit"]

A move is a call or return that enters another file of the project; moves by call are pairs of successive calls in
different files, which leaves out the returns. Comprehensions and resumed coroutines are no calls. Core's operations run
on the real scheduler and manager; the device has no memory, since core only handles block numbers. The HTTP operations
run on a whole service in this process, from the first middleware on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from kvferry.app.api.app import create_app
from kvferry.core.engine_api import StepProgress
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import Hit, Miss, OffloadScheduler
from kvferry.core.transfers import StepPlan, TransferResult
from tests.harness.loop_service import start_service

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "app", "cuda_ops", "migrations")
GOAL_FILES = 12
GOAL_MOVES = 35

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
NUM_BLOCKS = 8
NUM_SLOTS = 4 * NUM_BLOCKS
NUM_TOKENS = NUM_BLOCKS * BLOCK_TOKENS + 1

Place = tuple[str, str]
"""File and qualified name of a function."""


# --- tracing ------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """The calls of one operation, in order, each with its depth."""

    operation: str
    folder: str
    calls: list[tuple[int, Place]] = field(default_factory=list)
    num_moves: int = 0
    _current: str = ""

    def files(self, folder: str) -> set[str]:
        """Return the files of a folder that were entered."""
        return {file for _, (file, _) in self.calls if file.startswith(f"{folder}/")}

    @property
    def num_moves_by_call(self) -> int:
        """Pairs of successive calls in different files."""
        files = [file for _, (file, _) in self.calls]
        return sum(file != following for file, following in pairwise(files))

    def enter(self, file: str) -> None:
        """Count a move unless this file is the current one, or the first."""
        self.num_moves += self._current not in ("", file)
        self._current = file


_walk: ContextVar[Walk | None] = ContextVar("walk", default=None)


@dataclass
class _Frames(threading.local):
    """The project's active frames on one thread, innermost last. `seen` are suspendable frames that were entered."""

    active: list[tuple[FrameType, str, bool]] = field(default_factory=list)
    seen: set[FrameType] = field(default_factory=set)


_frames = _Frames()


@cache
def _place(code: CodeType) -> Place | None:
    """Return where a function of the project stands; None for other code."""
    path = Path(code.co_filename)
    if not path.is_absolute() or not (path := path.resolve()).is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return (relative.as_posix(), code.co_qualname) if relative.parts[0] in FOLDERS else None


def _profile(frame: FrameType, event: str, arg: object) -> None:
    if event not in ("call", "return"):
        return
    walk = _walk.get()
    if walk is None or (place := _place(frame.f_code)) is None:
        return
    active, seen = _frames.active, _frames.seen
    file, name = place
    if event == "call":
        is_counted = not name.endswith("comp>") and not name.endswith("<genexpr>") and frame not in seen
        if frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
            seen.add(frame)
        active.append((frame, file, is_counted))
        if is_counted:
            walk.calls.append((sum(counted for _, _, counted in active) - 1, place))
            walk.enter(file)
    elif active and active[-1][0] is frame:
        _, _, was_counted = active.pop()
        if was_counted and active:
            walk.enter(active[-1][1])


@contextmanager
def trace(walk: Walk) -> Iterator[None]:
    """Count what this context calls on any thread that was started since `trace_threads`, and on this one."""
    _frames.active.clear()
    _frames.seen.clear()
    token = _walk.set(walk)
    sys.setprofile(_profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        _walk.reset(token)


@contextmanager
def trace_threads() -> Iterator[None]:
    """Have threads that start within this block follow the walk of their context."""
    threading.setprofile(_profile)
    try:
        yield
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # documented: None ends it


# --- operations of core -------------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """An `EngineRequest` of `NUM_BLOCKS` full blocks and one token; equal texts share all blocks."""

    request_id: str
    text: str
    aliases: Sequence[str] = ()
    num_prompt_tokens: int = NUM_TOKENS
    num_tokens: int = NUM_TOKENS
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    block_hashes: Sequence[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = [hashlib.sha256(f"{self.text} {i}".encode()).digest() for i in range(NUM_BLOCKS)]


class Device:
    """A `DeviceView` without memory."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Do nothing: no block is reused here."""

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """Do nothing: no block is reused here."""

    def free_blocks(self) -> Iterator[int]:
        return iter(())

    def contents(self, block_ids: Sequence[int]) -> Sequence[bytes | None]:
        return [None] * len(block_ids)

    def resident(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    def take_allocated(self, among: Container[int]) -> Mapping[int, bytes | None]:
        return {}


class CoreWalks:
    """Core's operations on one scheduler. Raises `RuntimeError` if an operation does not do what its name says."""

    TABLES = (list(range(NUM_BLOCKS + 1)),)

    def __init__(self) -> None:
        layout = GroupLayout([GroupSpec(BLOCK_TOKENS, BLOCK_BYTES)])
        manager = OffloadManager(NUM_SLOTS, BLOCK_BYTES)
        policies = PolicyResolver(RequestPolicy(), {}, manager.lock)
        self.scheduler = OffloadScheduler(manager, policies, Device(), layout)
        self.now_s = 1000.0
        self.walks: list[Walk] = []

    def run(self) -> list[Walk]:
        """Store, load, evict and reset."""
        self._add("first", "a")
        miss = self._trace("match, miss", lambda: self._match("first"))
        _expect(isinstance(miss, Miss), f"an empty pool answers {miss}")
        self._compute("first", "store, planned")
        self._add("second", "a")
        hit = self._trace(f"match, hit of {NUM_BLOCKS} blocks", lambda: self._match("second"))
        _expect(hit == Hit(NUM_TOKENS - 1), f"stored blocks are found as {hit}")
        self._load("second")
        for text in "bcd":
            self._add(text, text)
            self._match(text)
            self._compute(text)
        self._add("evicting", "e")
        self._match("evicting")
        self._compute("evicting", "store, with eviction")
        self._add("late", "a")
        late = self._match("late")
        _expect(isinstance(late, Miss), f"the least recently used blocks are found as {late}")
        ticket = self._trace("reset of the whole pool", lambda: self.scheduler.resets.reset(self.now_s))
        _expect(ticket.dropped_blocks == NUM_SLOTS, f"a reset of a full pool answers {ticket}")
        return self.walks

    def _trace(self, operation: str, run: Callable[[], Any]) -> Any:
        walk = Walk(operation, "core")
        self.walks.append(walk)
        self.now_s += 0.001
        with trace(walk):
            return run()

    def _add(self, request_id: str, text: str) -> None:
        self.scheduler.on_new_request(Prompt(request_id, text), self.now_s)

    def _match(self, request_id: str) -> Any:
        return self.scheduler.match(request_id, 0, self.now_s)

    def _compute(self, request_id: str, operation: str | None = None) -> None:
        """Compute a whole prompt and store its blocks; trace that if it has a name."""
        scheduler = self.scheduler
        scheduler.commit(request_id, self.TABLES, 0, self.now_s)
        progress = [StepProgress(request_id, self.TABLES, NUM_TOKENS)]
        if operation is None:
            self._finish(scheduler.plan_step(progress, self.now_s))
        else:
            plan = self._trace(operation, lambda: scheduler.plan_step(progress, self.now_s))
            _expect([job.num_blocks for job in plan.stores] == [NUM_BLOCKS], f"a store is planned as {plan}")
            self._finish(plan, "store, completed" if operation == "store, planned" else None)
        scheduler.on_request_finished(request_id, self.now_s)

    def _load(self, request_id: str) -> None:
        scheduler, num_tokens = self.scheduler, NUM_TOKENS - 1
        self._trace("load, committed", lambda: scheduler.commit(request_id, self.TABLES, num_tokens, self.now_s))
        plan = scheduler.plan_step([], self.now_s)
        _expect([job.num_blocks for job in plan.loads] == [NUM_BLOCKS], f"a load is planned as {plan}")
        outcomes = self._finish(plan, "load, completed")
        _expect([(one.ok, one.num_tokens) for one in outcomes] == [(True, num_tokens)], f"a load ends as {outcomes}")
        scheduler.on_request_finished(request_id, self.now_s)

    def _finish(self, plan: StepPlan, operation: str | None = None) -> Any:
        """Report all jobs of a plan as done; trace that if it has a name."""
        scheduler = self.scheduler
        results = [TransferResult(job.job_id, num_bytes=1, seconds=0.001) for job in plan.jobs]
        if operation is None:
            return scheduler.on_transfers_finished(results, self.now_s)
        return self._trace(operation, lambda: scheduler.on_transfers_finished(results, self.now_s))


def core_walks() -> list[Walk]:
    """Trace core's operations, after a run that compiles and caches what the first use does."""
    CoreWalks().run()
    return CoreWalks().run()


# --- operations over HTTP -----------------------------------------------------------------------------------------


def http_walks() -> list[Walk]:
    """Trace calls of the admin API on a service with a database, after calls that fill its caches."""
    with tempfile.TemporaryDirectory() as folder, trace_threads(), start_service(Path(folder)) as service:
        transport = httpx.ASGITransport(create_app(service.context))
        return asyncio.run(_call(transport))


async def _call(transport: httpx.ASGITransport) -> list[Walk]:
    walks = []
    body = {"store": False, "ttl_s": 60}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for operation, method, path, json in (
            ("HTTP GET stats", "GET", "/admin/v1/stats", None),
            ("HTTP PUT override", "PUT", "/admin/v1/requests/one/policy", body),
        ):
            await client.request(method, path, json=json)
            walk = Walk(operation, "app")
            with trace(walk):
                response = await client.request(method, path, json=json)
            _expect(response.status_code == 200, f"{method} {path} is answered {response.status_code} {response.text}")
            walks.append(walk)
        shown = (await client.get("/admin/v1/requests/one/policy")).json()
        _expect(shown["override"] is not None, f"an override that was set is shown as {shown}")
    return walks


# --- the table ----------------------------------------------------------------------------------------------------


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"the operation did not do what was to be traced: {what}")


def _cell(number: int, goal: int | None) -> str:
    return f"**{number}**" if goal is not None and number > goal else str(number)


def table(walks: Sequence[Walk]) -> str:
    """Return one markdown table of all walks, what misses its goal in bold."""
    lines = [
        f"Goals: at most {GOAL_FILES} files (of core; of app for HTTP) and, within core, {GOAL_MOVES} moves.",
        "",
        "| operation | calls | files of core | files of app | moves by call | moves, returns too |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for walk in walks:
        is_core = walk.folder == "core"
        cells = (
            walk.operation,
            str(len(walk.calls)),
            _cell(len(walk.files("core")), GOAL_FILES if is_core else None),
            "" if is_core else _cell(len(walk.files("app")), GOAL_FILES),
            _cell(walk.num_moves_by_call, GOAL_MOVES if is_core else None),
            _cell(walk.num_moves, GOAL_MOVES if is_core else None),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def listing(walk: Walk) -> str:
    """Return the calls of a walk in their order, indented by depth."""
    width = max(len(file) for _, (file, _) in walk.calls)
    return "\n".join(f"{file:<{width}}  {'  ' * depth}{name}" for depth, (file, name) in walk.calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="OPERATION", help="also list the calls of operations that begin so, in order")
    options = parser.parse_args()
    walks = [*core_walks(), *http_walks()]
    print(table(walks))
    for walk in walks:
        if options.show is not None and walk.operation.startswith(options.show):
            print(f"\n{walk.operation}\n\n{listing(walk)}")


if __name__ == "__main__":
    main()
