"""A whole service for tests: loop engine, core, store, settings and server, wired the way the process does it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from kvferry.app.api.app import create_app
from kvferry.app.api.audit import PrefetchAudit
from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.guard import ErrorLog, OffloadGuard, guarded_sink
from kvferry.app.operations.policy_store import PolicyStore
from kvferry.app.operations.tenant_store import TenantStore
from kvferry.app.operations.tier_flushes import TierFlushes
from kvferry.app.operations.tier_resets import TierResets
from kvferry.app.settings import Settings
from kvferry.app.settings.live import LiveSettings
from kvferry.app.settings.store_mode import StoreModeChoice, StoreModeSetting
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.store import MetadataStore, upgrade
from kvferry.app.store.database import DEFAULT_WAITS, Waits
from kvferry.app.telemetry.advice import Adviser
from kvferry.app.telemetry.balance import BalanceWatch
from kvferry.app.telemetry.curve import Present, WhatIf
from kvferry.app.telemetry.events import EventFeed, EventType
from kvferry.app.telemetry.history import StatsHistory
from kvferry.app.telemetry.prompts import PromptFeed
from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.fs.tier import FileTierSettings
from kvferry.app.tiers.registry import TierRegistry
from kvferry.core.engine_api import UnknownAdapter
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import make_keys
from kvferry.core.partings import KeepTokenIds, Partings
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.records import HeaderQueue
from kvferry.core.pool.tenant_limits import TenantLimits
from tests.harness.http_server import ClosingFlag, Running, serve
from tests.harness.loop_engine import BLOCK_BYTES, BLOCK_TOKENS, LoopEngine, LoopRequest
from tests.harness.toy_tiers import ToyTier
from tests.harness.toy_tokens import ToyRequest
from tests.harness.waiting import DEADLINE_S, wait_until

ADMIN = "admin-token-0123456789"
READ = "read-token-0123456789"
ENGINE_NAME = "test-engine"
DEVICE_BYTES = 64 * BLOCK_BYTES


@dataclass
class Service(Running):
    """A running server, and the parts of its service that tests use."""

    engine: LoopEngine
    store: MetadataStore
    context: AdminContext
    reasons: list[str]
    degraded: list[str]
    may_answer: threading.Event
    """Cleared, the check of readiness hangs."""
    may_open: threading.Event
    """Cleared, opening a tier hangs."""
    database: Path
    shared_client: httpx.Client
    tiers: dict[str, ToyTier]
    """Attached tiers, also after they are detached."""

    def settle(self) -> None:
        """Wait until no transfer is open."""
        wait_until(lambda: not self.engine.offload.has_open_work(), "all transfers have ended")

    def settle_history(self) -> None:
        """Wait until history is in the database."""
        if not self.store.journal.flush(DEADLINE_S):
            raise TimeoutError(f"history is not written: {self.store.degraded()}")


@cache
def name_of_token(token: str, kind: str) -> str:
    """Return how the audit names a token."""
    return f"{kind}:{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def engine_router() -> APIRouter:
    """Stands for an engine's `/v1`: says what arrived, and fails on request. Made once: routes take a while."""
    router = APIRouter(prefix="/v1", tags=["engine"])

    @router.post("/echo")
    async def echo(request: Request) -> Any:
        return await request.json()

    @router.get("/models")
    async def models() -> dict[str, list[str]]:
        return {"data": []}

    @router.get("/id")
    async def request_id(request: Request) -> dict[str, str | None]:
        return {"id": request.headers.get("X-Request-ID")}

    @router.get("/thread")
    async def thread() -> str:
        return await asyncio.to_thread(lambda: "done")

    @router.get("/fail")
    async def fail() -> None:
        raise RuntimeError("a secret in a message")

    @router.get("/fail-late")
    async def fail_late() -> StreamingResponse:
        async def body() -> Any:
            yield b"half"
            raise RuntimeError("too late to say so")

        return StreamingResponse(body())

    return router


def apply_settings(engine: LoopEngine, prompts: PromptFeed, settings: Settings, names: Collection[str]) -> None:
    """What the wiring does with settings that change while running, as far as these tests look."""
    engine.manager.operator_pins.max_fraction = settings.max_pinned_fraction
    engine.manager.admission.set_threshold(settings.store_threshold)
    engine.manager.switch_policy(settings.eviction_policy)
    if "explain_bytes" in names:
        engine.offload.emits_token_ids = settings.explain_bytes > 0
        prompts.send(KeepTokenIds(settings.explain_bytes))
    logging.getLogger("kvferry.app").setLevel(settings.log_level.value.upper())


def hash_prompt(token_ids: Sequence[int], cache_salt: str | None, lora: str | None) -> Sequence[bytes]:
    """The hashes that a request of the loop engine has, which depend on its tokens alone."""
    if lora is not None:
        raise UnknownAdapter("no request has used this adapter")
    return ToyRequest("any", list(token_ids), len(token_ids), 1, hash_block_size=BLOCK_TOKENS).block_hashes


def open_toy_tiers(
    engine: LoopEngine, may_open: threading.Event, tiers: dict[str, ToyTier], entries: Sequence[TierSettings]
) -> dict[str, ToyTier]:
    """Open a toy tier for each entry of the settings, whatever its type; one without its folder is refused."""
    may_open.wait(DEADLINE_S)
    for entry in entries:
        if isinstance(entry, FileTierSettings) and not entry.path.parent.is_dir():
            raise TierRefused(
                f"KVFERRY_TIERS: tier {entry.name}: path={entry.path} cannot be created; create {entry.path.parent}"
            )
    opened = {entry.name: ToyTier(engine) for entry in entries}
    tiers |= opened
    return opened


@cache
def _empty_database() -> bytes:
    """The file of an upgraded database. Upgrading one for each service would take most of its start."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kvferry.db"
        upgrade(f"sqlite:///{path}")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.read_bytes()


@contextmanager
def start_service(
    folder: Path,
    *,
    admin_token: str | None = None,
    read_token: str | None = None,
    num_slots: int = 256,
    header_queue: HeaderQueue | None = None,
    hashes_prompts: bool = True,
    waits: Waits = DEFAULT_WAITS,
    advises_after_s: float | None = None,
) -> Iterator[Service]:
    """Everything up, until the block ends; a second start in the same folder finds the same database.

    With `advises_after_s` the service gives advice after that time, and each time it checks.
    """
    database = folder / "kvferry.db"
    given = {"admin_token": admin_token, "read_token": read_token}
    settings = Settings(
        _env_file=None,
        state_dir=str(folder),
        database_url=f"sqlite:///{database}",
        **{name: value for name, value in given.items() if value is not None},
    )
    folder.mkdir(parents=True, exist_ok=True)
    if not database.exists():
        database.write_bytes(_empty_database())
    store = MetadataStore(
        settings.resolved_database_url(),
        ENGINE_NAME,
        settings.pool_kind.value,
        waits=waits,
    )
    feed = EventFeed(store.journal.append, BLOCK_TOKENS)
    layout = GroupLayout([GroupSpec(BLOCK_TOKENS, BLOCK_BYTES)])
    span = {} if advises_after_s is None else {"min_span_s": 0.0}
    pace = {} if advises_after_s is None else {"window_s": advises_after_s}
    what_if = WhatIf(lambda: Present.of(engine.offload), layout, DEVICE_BYTES, enabled=True, **span)
    partings = Partings(BLOCK_TOKENS)
    prompts = PromptFeed([what_if, partings])
    sink = guarded_sink([feed.publish, prompts.receive], ErrorLog())
    engine = LoopEngine(
        num_slots, sink=sink, max_pinned_fraction=settings.max_pinned_fraction, header_queue=header_queue
    )
    policies = PolicyStore(store, engine.offload.policies, feed)
    policies.load(time.time())
    guard = OffloadGuard(engine.offload, 1, ErrorLog())
    limits = TenantLimits(engine.manager)
    tenants = TenantStore(store, limits, guard.guarding)
    tenants.load()
    store.start(Inventory(engine.manager))
    closing, samples = ClosingFlag(), StatsHistory(time.time())
    reasons, degraded, may_answer = list[str](), list[str](), threading.Event()
    may_answer.set()
    tiers, may_open = dict[str, ToyTier](), threading.Event()
    may_open.set()
    tier_resets = TierResets(store, engine.offload.resets)
    tier_flushes = TierFlushes(engine.offload, guard, feed, lambda unverified: None)
    context = AdminContext(
        engine=EngineInfo("embedded", "tiny", "cpu", BLOCK_TOKENS, 1, 1),
        scheduler=engine.offload,
        guard=guard,
        wake=engine.wake,
        started_s=time.monotonic(),
        readiness=lambda: list(reasons) if may_answer.wait(DEADLINE_S) else ["hangs"],
        degraded=lambda: list(degraded),
        closing=closing,
        samples=samples,
        balance=BalanceWatch(engine.offload, samples, partial(feed.changed, EventType.STORING)),
        adviser=Adviser(engine.offload, samples, prompts, what_if, partings, limits, **pace),
        prompts=prompts,
        what_if=what_if,
        partings=partings,
        store_mode=lambda: StoreModeChoice(engine.offload.store_mode, StoreModeSetting.EAGER, "as set"),
        hash_prompt=hash_prompt if hashes_prompts else None,
        store=store,
        policies=policies,
        tenants=tenants,
        feed=feed,
        settings=LiveSettings(settings, partial(apply_settings, engine, prompts)),
        tier_registry=TierRegistry(
            (), {}, engine.offload, tier_resets.prepare, partial(open_toy_tiers, engine, may_open, tiers)
        ),
        tier_resets=tier_resets,
        prefetch_audit=PrefetchAudit(store),
        tier_flushes=tier_flushes,
        engine_router=engine_router(),
    )
    try:
        with serve(create_app(context), closing) as running, running.client() as shared:
            yield Service(
                **vars(running),
                engine=engine,
                store=store,
                context=context,
                reasons=reasons,
                degraded=degraded,
                may_answer=may_answer,
                may_open=may_open,
                database=database,
                shared_client=shared,
                tiers=tiers,
            )
    finally:
        tier_flushes.close()
        prompts.close()
        engine.close()
        store.close(5)


@contextmanager
def locked(service: Service) -> Iterator[None]:
    """Hold the write lock, as a backup or a shell left open would."""
    with sqlite3.connect(service.database, isolation_level=None, timeout=DEADLINE_S) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
    connection.close()


def fill(service: Service, *requests: LoopRequest) -> list[str]:
    """Store the requests' blocks and give their hashes."""
    hashes: list[str] = []
    for request in requests:
        service.engine.answer(request)
        hashes += [key.hex() for key in make_keys(request.block_hashes, 0)]
    service.settle()
    return hashes


def attach_tier(service: Service) -> ToyTier:
    """Attach a tier called disk."""
    folder = service.database.parent / "tiers"
    folder.mkdir()
    definition = {"type": "fs", "path": str(folder / "disk"), "max_bytes": "1GiB"}
    assert service.shared_client.put("/admin/v1/tiers/disk", json=definition).status_code == 201
    return service.tiers["disk"]


def pages(client: httpx.Client, url: str, limit: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor = None
    while True:
        answer = client.get(url, params={"limit": limit, **({"cursor": cursor} if cursor else {})}).json()
        assert set(answer) >= {"items", "next_cursor"}
        assert len(answer["items"]) <= limit
        items += answer["items"]
        cursor = answer["next_cursor"]
        if cursor is None:
            return items


def errors_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 422, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert all(error["message"] for error in answer.json()["errors"])
    return [error["field"] for error in answer.json()["errors"]]
