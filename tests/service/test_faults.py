"""Exceptions at random places of a whole service: requests are answered, nothing leaks, offloading comes back."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.serve.process import Process
from kvferry.app.service.server import listen, make_server, url_of
from kvferry.app.settings import Settings
from kvferry.app.store.threads import CallThreads
from kvferry.app.telemetry.logs import LogPipe
from kvferry.app.tiers.job_queue import JobQueue
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.pool.pins import Pin
from kvferry.core.scheduler.jobs import OpenJob
from kvferry.core.scheduler.requests import RequestState
from kvferry.core.tiers.client import OpenTierJob
from kvferry.cuda_ops.copy.engine import JobLedger
from tests.harness.faults import Faults
from tests.harness.identities import check_identities
from tests.harness.service_process import Served
from tests.harness.waiting import DEADLINE_S, wait_until

SEED = int(os.environ.get("FAULT_SEED", "1"))
NUM_FAULTS = int(os.environ.get("FAULTS", "20"))
"""Random faults in one run; 1,000 take a few minutes."""
NUM_CLIENTS = 8
NUM_TRIES = 20
"""How often to ask until the tier was used: on a busy machine computing may seem faster."""
SPARE_FILES = 8
"""Database connections that may be open at one moment and not at another."""
BLOCK = 8
OUTPUT = 4
SLOT_BYTES = 32 << 10
NUM_SLOTS = 64
KEEP_OUT = {"load": False, "store": False}

PATCHED = {
    "kvferry.core": (
        "cost_model", "expiry", "policy", "pool.admission", "pool.eviction.arc", "pool.eviction.evictor",
        "pool.eviction.hazard", "pool.eviction.history", "pool.eviction.learning", "pool.eviction.lru", "pool.index",
        "pool.inventory", "pool.manager", "pool.pins", "pool.resize", "pool.slots", "scheduler.cascades",
        "scheduler.demands", "scheduler.inflight", "scheduler.jobs", "scheduler.lazy", "scheduler.loads",
        "scheduler.lookup", "scheduler.promotions", "scheduler.requests", "scheduler.resets", "scheduler.scheduler",
        "scheduler.store_planner", "scheduler.stores", "scheduler.tier_loads", "scheduler.tiering", "tiers.client",
        "tiers.known_missing",
    ),
    "kvferry.app.tiers": ("job_queue", "opening", "threaded", "fs.epoch_file", "fs.folder", "fs.limit", "fs.store"),
    "kvferry.app.store": (
        "database", "history", "intents", "journal", "name_claim", "reader", "retention", "slot_rows",
    ),
    "kvferry.cuda_ops": (
        "copy.cpu_copy", "copy.segments", "persistent.headers", "persistent.pool_file", "persistent.header_writer",
        "persistent.sealing", "pool.host_pool",
    ),
    "kvferry.app": ("telemetry.events", "pool.resizer", "pool.watch", "service.supervisor"),
}  # fmt: skip
"""Every method of the classes of these modules raises.

Trusted: the guard itself, queues of database calls (`TRUSTED`), the engine and its loop, and the HTTP server.
`BlockPool` and `JobLedger` raise before they change anything, which is the contract of `DeviceView` and of
`JobLedger.open`.
"""


TRUSTED = (CallThreads,)
HANDOVERS = {JobQueue: ["results"], ThreadedTier: ["poll"]}
"""They raise before they take results: a lost one would leave its reset open, which has no time limit."""


def patch_all(faults: Faults) -> None:
    for package, modules in PATCHED.items():
        for name in modules:
            module = importlib.import_module(f"{package}.{name}")
            for cls in vars(module).values():
                is_own = inspect.isclass(cls) and cls.__module__ == module.__name__
                if is_own and not issubclass(cls, (Exception, *TRUSTED)):
                    faults.patch(cls, only_before=HANDOVERS.get(cls, ()))
    faults.patch(JobLedger, after=False)
    faults.patch(BlockPool, ["hold", "release", "free_blocks", "contents", "resident"], after=False)


def make_prompts() -> list[list[int]]:
    """Prompts that share prefixes in families, more than device and pool hold."""
    rng = random.Random(5)
    families = [[rng.randint(3, 249) for _ in range(BLOCK * 12)] for _ in range(6)]
    return [
        families[i % 6][: BLOCK * rng.randint(3, 12)] + [rng.randint(3, 249) for _ in range(rng.randint(1, BLOCK * 3))]
        for i in range(24)
    ]


class Service(Served):
    """A service in this process, and its HTTP client."""

    process: Process

    def tokens(self, prompt: list[int] | str, **body: Any) -> list[int]:
        return super().tokens(prompt, **{"max_tokens": OUTPUT, "ignore_eos": True} | body)

    def reset(self) -> bool:
        return self.http.post("/admin/v1/reset", json={"drain_timeout_s": 60}).status_code == 200

    def leftovers(self) -> dict[str, object]:
        """What should be zero while nothing runs."""
        stats, engine = self.stats(), self.process.engine
        assert engine is not None
        pool, requests = stats["pool"], stats["requests"]
        left: dict[str, object] = {name: pool[name] for name in ("storing", "loading", "pinned")}
        left |= {name: requests[name] for name in ("running", "waiting_for_load")}
        left |= {f"{name} in flight": stats[name]["in_flight"] for name in ("store", "load")}
        left |= {f"open jobs of {name}": tier["open_jobs"] for name, tier in stats["tiers"].items()}
        left |= {"open jobs": self.process.service.scheduler.snapshot().open_jobs, "held": engine.block_pool.num_held}
        left["device blocks"] = engine.settings.device_blocks - engine.block_pool.num_free
        left["slots"] = pool["slots"] - pool["free"] - pool["ready"] - pool["storing"]
        return {name: value for name, value in left.items() if value}

    def not_ready(self) -> object:
        answer = self.http.get("/readyz").json()
        # A thread that runs again after it died is listed for a minute.
        answer["degraded"] = [text for text in answer["degraded"] if not text.endswith("and runs again")]
        return None if answer == {"ready": True, "reasons": [], "degraded": []} else answer


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[Service]:
    tier = {"type": "fs", "name": "disk", "path": str(folder / "tier"), "max_bytes": 96 * (SLOT_BYTES + 4096)}
    tier |= {"timeout_s": 10}
    given = {
        "state_dir": folder / "state", "engine_name": "faulty", "model": "tiny", "dtype": "float64",
        "block_size": BLOCK,
        "device_blocks": 64, "max_running": 8, "pool_bytes": NUM_SLOTS * SLOT_BYTES, "load_decision": "always",
        "tiers": json.dumps([tier]), "log_level": "error",
    } | settings  # fmt: skip
    with ExitStack() as undo:
        made = Settings(_env_file=None, **given)  # type: ignore[arg-type]
        log = undo.enter_context((folder / "log").open("w"))
        logs = undo.enter_context(LogPipe(made, stream=log, own_loggers_only=True))
        listener = undo.enter_context(listen("127.0.0.1", 0))
        process = Process(made, logs)
        undo.callback(process.close)
        process.start()
        server = make_server(process)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        limits = httpx.Limits(max_connections=20)
        http = httpx.Client(base_url=url_of(listener), timeout=DEADLINE_S, trust_env=False, limits=limits)
        service = Service(process, folder / "log", url_of(listener), http)
        wait_until(lambda: server.started, "it serves", DEADLINE_S)
        yield service
        service.http.close()
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def steer(service: Service, stop: threading.Event, seed: int) -> Counter[str]:
    """What an operator does, over and over; answers of any status are counted."""
    rng, seen = random.Random(seed), Counter[str]()
    calls: list[tuple[str, str, object]] = [
        ("GET", "/admin/v1/stats", None), ("GET", "/metrics", None), ("GET", "/readyz", None),
        ("GET", "/admin/v1/requests", None), ("GET", "/admin/v1/blocks?limit=50", None),
        ("GET", "/admin/v1/evictions", None),
        ("POST", "/admin/v1/reset", {"drain_timeout_s": 0.1}), ("POST", "/admin/v1/reset", {"drain_timeout_s": 0.1}),
        ("POST", "/admin/v1/reset", {"match": {"request": "*a*"}, "drain_timeout_s": 0.1}),
        ("POST", "/admin/v1/reset", {"tiers": ["disk"], "drain_timeout_s": 0.1}),
        *(("PATCH", "/admin/v1/config", {"eviction_policy": policy}) for policy in ("lru", "arc", "hazard")),
        *(("PATCH", "/admin/v1/config", {"store_mode": mode}) for mode in ("eager", "lazy")),
        *(("PATCH", "/admin/v1/config", {"pool_bytes": count * SLOT_BYTES}) for count in (32, 48, NUM_SLOTS)),
    ]  # fmt: skip
    while not stop.wait(0.02):
        method, path, body = rng.choice(calls)
        answer = service.http.request(method, path, json=body)
        seen[f"{method} {path.split('?')[0]} {answer.status_code // 100}xx"] += 1
    return seen


def ask_while_steering(service: Service, prompts: list[list[int]], answers: list[list[int]], seed: int) -> Counter[str]:
    """All prompts in random order by 8 clients, each answered right; what the operator saw meanwhile."""
    order = random.Random(seed).sample(range(len(prompts)), len(prompts))
    stop = threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
        operator = threads.submit(steer, service, stop, seed)
        try:
            asked = [threads.submit(service.tokens, prompts[i]) for i in order]
            for i, future in zip(order, asked, strict=True):
                assert future.result(DEADLINE_S) == answers[i]
        finally:
            stop.set()
        return operator.result(DEADLINE_S)


def ask_all(service: Service, prompts: list[list[int]], answers: list[list[int]]) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        assert list(threads.map(service.tokens, prompts)) == answers


def settle(service: Service) -> None:
    """Reset, and check that all is free, ready and consistent."""
    try:
        wait_until(service.reset, "a reset works")
        wait_until(lambda: not service.leftovers(), "nothing is under way")
    except TimeoutError as error:
        last = service.http.post("/admin/v1/reset", json={"drain_timeout_s": 1}).text
        raise AssertionError(f"left: {service.leftovers()}; {service.not_ready()}; {last}") from error
    check_identities(service.stats())


def restore_size(service: Service) -> None:
    """Ask for the size that the pool began with, and check that it has that."""
    answers = []

    def has_its_size() -> bool:
        answers.append(service.http.patch("/admin/v1/config", json={"pool_bytes": NUM_SLOTS * SLOT_BYTES}))
        return answers[-1].status_code == 200 and service.stats()["pool"]["slots"] == NUM_SLOTS

    try:
        wait_until(has_its_size, "the pool has its size again")
    except TimeoutError as error:
        raise AssertionError(f"{answers[-1].text}; {service.stats()['pool']}; {service.not_ready()}") from error


def assert_offloads(service: Service, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Blocks are stored in the pool and the tier, and loaded from both."""
    before = service.stats()["prompt_tokens"]
    hits = before
    for _ in range(NUM_TRIES):
        ask_all(service, prompts, answers)
        assert service.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
        ask_all(service, prompts, answers)
        hits = service.stats()["prompt_tokens"]
        if hits["host_hit"] > before["host_hit"] and hits["tier_hit"]["disk"] > before["tier_hit"]["disk"]:
            break
    assert hits["host_hit"] > before["host_hit"], service.stats()
    assert hits["tier_hit"]["disk"] > before["tier_hit"]["disk"], service.stats()["tiers"]
    assert service.stats()["offloading"]["is_on"]
    wait_until(lambda: not service.leftovers(), "nothing is under way", DEADLINE_S)


def count_objects() -> Counter[str]:
    gc.collect()
    kinds = (RequestState, OpenJob, OpenTierJob, Pin)
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))


ON_DEMAND = Counter({"kvferry-ahead": 1})
"""Threads that the first store in lazy mode starts."""


def own_threads() -> Counter[str]:
    """Return the project's threads that run, by name, without executors': those of the service before may still end."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")]
    return Counter(name for name in names if not name.startswith(("kvferry-bodies", "kvferry-database")))


def open_files() -> Counter[str]:
    """What file descriptors refer to, without those that come and go: of clients and of the tier's last written blocks.

    A fault that is raised after a block's file was opened loses its descriptor, as no code of the project could.
    """
    links = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            links[link] += not (link.startswith("socket:") or "/tier/blocks/" in link)
    return links


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("pool_kind", "policy", "mode"), [("file", "lru", "eager"), ("pinned", "arc", "lazy")], ids=["file", "pinned"]
)
def test_requests_are_answered_when_anything_raises(
    pool_kind: str, policy: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, SEED, probability=0.002, most=NUM_FAULTS)
    patch_all(faults)
    settings: dict[str, object] = {"pool_kind": pool_kind, "eviction_policy": policy, "store_mode": mode}
    if pool_kind == "file":
        settings["pool_path"] = tmp_path / "pool"
    prompts = make_prompts()
    seen, rounds = Counter[str](), 0
    with serving(tmp_path, **settings) as service:
        answers = [service.tokens(prompt, kv_transfer_params=KEEP_OUT) for prompt in prompts]
        ask_all(service, prompts, answers)
        settle(service)
        threads, files = own_threads(), open_files()
        while faults.left:
            rounds += 1
            before = faults.left
            with faults.on():
                seen += ask_while_steering(service, prompts, answers, SEED * 1000 + rounds)
            if rounds % 10 == 0:
                settle(service)
                resident, num_files = psutil.Process().memory_info().rss >> 20, open_files().total()
                print(f"{rounds} rounds, {faults.left} left, {resident} MiB, {num_files} files, {count_objects()}")  # noqa: T201
            assert faults.left < before or rounds < 200
        num_faults, num_places = faults.raised.total(), len(faults.raised)
        print(f"seed {SEED}: {num_faults} faults in {num_places} places, {rounds * len(prompts)} requests, {seen}")  # noqa: T201
        settle(service)
        restore_size(service)
        assert_offloads(service, prompts, answers)
        wait_until(lambda: service.not_ready() is None, f"ready: {service.not_ready()}")
        settle(service)
        wait_until(lambda: not threads - own_threads(), f"all threads run: {own_threads()}, {threads}")
        assert not own_threads() - threads - ON_DEMAND
        assert open_files().total() <= files.total() + SPARE_FILES, open_files() - files
