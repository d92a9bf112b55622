"""Latency and CPU time of every admin call beside a busy engine, with much of everything in the database.

Run: OMP_NUM_THREADS=1 python -m bench.admin [--calls 100] [--rows 1000000] [--overrides 10000] [--rules 1000]
    [--tenants 10000]

A service in a process of its own serves completions to another process all the time. What is in its database is written
before it starts (`bench.admin_rows`). Then each route of `/openapi.json` is called many times, with filters and cursors
deep into the pages, `/healthz` between its calls, so that a noisy machine shows there as well. CPU time is that of the
service per call, measured without completions, less what the idle service takes.

Goal: 50 ms at p99 for every route but those in `EXEMPT`. A route that the benchmark does not know is called without
parameters if it is a GET without any in its path, else listed as missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.admin_rows import digest, fill_policies
from bench.history import ENGINE, SPACING_S, START_S, fill
from bench.report import environment
from kvferry.app.replay.report import percentile
from kvferry.app.tenant_store import MAX_LIMITS
from kvferry.app.times import rfc3339
from kvferry.core.rules import MAX_RULES

GOAL_MS = 50.0
ADMIN = "/admin/v1"
TIER = "disk"
LOAD_PAUSE_S = 0.05
CPU_CALLS = 20
PROMPT_TOKENS = 10_000
"""Length of the prompts that are looked up and prefetched; the tier has their first `HELD_TOKENS`."""
HELD_TOKENS = 4000
PAGES_BEFORE = {"audit": 20, "rules": 5, "blocks": 5, "tenants": 50}
"""Pages of 100 before the deepest one that is read, by list."""
EXEMPT = {
    f"POST {ADMIN}/reset": "drains and searches",
    f"GET {ADMIN}/stats/stream": "a stream",
    f"GET {ADMIN}/events": "a stream",
    f"GET {ADMIN}/slots/map": "the slot map",
    f"DELETE {ADMIN}/tiers/{{name}}": "drains",
    f"DELETE {ADMIN}/blocks/{{hash}}": "the pool has too few blocks; waits for headers of a pool file",
}
"""Routes that are not measured, and why."""
FLUSH = f"{ADMIN}/tiers/{{name}}/flush"
OF_FLUSHES = {f"POST {FLUSH}", f"DELETE {FLUSH}"}
"""Routes without a measured CPU time, since copying continues beside their calls."""


@dataclass
class Times:
    """Milliseconds of a route's calls, and of the calls of `/healthz` between them."""

    calls: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    cpu_ms: float | None = None


@contextmanager
def serving(folder: Path, rows: int) -> Iterator[tuple[str, int]]:
    """Run `kvferry serve` on the prepared database; yield its address and process id."""
    settings = {
        "STATE_DIR": folder,
        "ENGINE_NAME": ENGINE,
        "PORT": 0,
        "POOL_BYTES": "256MiB",
        "WHAT_IF": "true",
        "TIERS": json.dumps([{"type": "fs", "name": TIER, "path": str(folder / "tier"), "max_bytes": "256MiB"}]),
        "EVICTION_HISTORY_ROWS": rows,
        "EVICTION_HISTORY_DAYS": 100_000,
    }
    env = os.environ | {"OMP_NUM_THREADS": "1"} | {f"KVFERRY_{name}": str(value) for name, value in settings.items()}
    log_path = folder / "serve.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.app.cli", "serve"], env=env, cwd=folder, stdout=log, stderr=log
        )
        try:
            address = ""
            while not address and process.poll() is None:
                time.sleep(0.1)
                address = log_path.read_text().partition("serving on ")[2].partition(": ")[0]
            if not address:
                raise RuntimeError(log_path.read_text())
            yield address, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def load(address: str, seed: int) -> None:
    """Send completions one after another until killed: prompts with shared heads, so that blocks are stored and hit."""
    rng = random.Random(seed)
    heads = [[rng.randrange(3, 250) for _ in range(512)] for _ in range(40)]
    with httpx.Client(base_url=address, timeout=60) as http:
        for number in range(10**9):
            prompt = rng.choice(heads) + [rng.randrange(3, 250) for _ in range(200)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
            http.post("/v1/completions", json=body, headers={"X-Request-ID": f"batch-{number}"})
            time.sleep(LOAD_PAUSE_S)


@contextmanager
def loading(address: str, seed: int) -> Iterator[None]:
    """Run `load` in another process."""
    process = subprocess.Popen([sys.executable, "-m", "bench.admin", "--load", address, "--seed", str(seed)])
    try:
        time.sleep(3)
        yield
    finally:
        process.kill()
        process.wait()


class Calls:
    """The calls of each route, as functions of the number of the call."""

    def __init__(self, http: httpx.Client, options: argparse.Namespace) -> None:
        self.http = http
        self.refused: set[str] = set()
        self._rng = random.Random(options.seed)
        self._held = [[self._rng.randrange(3, 250) for _ in range(HELD_TOKENS)] for _ in range(3)]
        self._rows, self._overrides, self._rules = options.rows, options.overrides, options.rules
        self._tenants = options.tenants
        self.keys: list[str] = []
        self.requests: list[str] = []
        self._deep: dict[str, dict[str, Any]] = {}

    def read_names(self) -> None:
        """Read the blocks, requests and cursors that calls name, once there are some."""
        self.keys = [block["hash"] for block in self._items("blocks", limit=200)]
        self.requests = [one["id"] for one in self._items("requests", limit=200)]
        self._deep = {name: self._deep_page(name, pages) for name, pages in PAGES_BEFORE.items()}

    def _items(self, name: str, **params: Any) -> list[dict[str, Any]]:
        answer = self.http.get(f"{ADMIN}/{name}", params=params)
        return list(answer.raise_for_status().json()["items"])

    def _deep_page(self, name: str, pages: int) -> dict[str, Any]:
        """Return the parameters of a page after `pages` others, or of the last one."""
        params: dict[str, Any] = {"limit": 100}
        for _ in range(pages):
            cursor = self.http.get(f"{ADMIN}/{name}", params=params).json()["next_cursor"]
            if cursor is None:
                break
            params["cursor"] = cursor
        return params

    def _send(self, method: str, path: str, *, allowed: tuple[int, ...] = (), **options: Any) -> None:
        answer = self.http.request(method, path if path.startswith("/") else f"{ADMIN}/{path}", **options)
        if not answer.is_success and answer.status_code not in allowed:
            self.refused.add(f"{method} {path.partition('?')[0]}: {answer.status_code} {answer.text[:300]}")

    def _get(self, path: str, *choices: dict[str, Any]) -> Callable[[int], None]:
        return lambda number: self._send("GET", path, params=choices[number % len(choices)] if choices else None)

    def _later(self) -> str:
        """Return a request id with an override, behind those that are deleted."""
        return f"later-{self._rng.randrange(self._overrides // 2, self._overrides)}"

    def _tenant(self) -> str:
        """Return a tenant with a limit, behind those that are deleted."""
        return digest(self._rng.randrange(self._tenants // 2, self._tenants))

    def _end_flush(self) -> None:
        """End the flush of the tier, if there is one."""
        self._send("DELETE", f"tiers/{TIER}/flush")

    def _evictions(self) -> list[dict[str, Any]]:
        end_s = START_S + self._rows * SPACING_S
        somewhere = [rfc3339(START_S + self._rng.random() * (end_s - START_S)) for _ in range(20)]
        cursors = [
            self.http.get(f"{ADMIN}/evictions", params={"until": until}).json()["next_cursor"] for until in somewhere
        ]
        return [
            {},
            {"limit": 1000},
            {"cursor": cursors[0]},
            {"cursor": cursors[1], "limit": 1000},
            {"until": somewhere[2], "reason": "operator"},
            {"request": f"request-{self._rng.randrange(self._rows // 64)}"},
            {"until": somewhere[3], "tenant": "tenant-7"},
            {"tenant": "tenant-7", "reason": "reset"},
            {"tenant": "tenant-7", "request": "request-3"},
            {"tenant": "no-such"},
            {"since": somewhere[4], "reason": "shrink"},
        ]

    def of_routes(self) -> dict[str, Callable[[int], None]]:
        """Return the calls by method and path."""
        end_s = START_S + self._rows * SPACING_S
        windows = [
            {},
            {"since": rfc3339(end_s - 3600)},
            {"since": rfc3339(START_S + 100), "until": rfc3339(end_s - 100)},
        ]
        send, rng = self._send, self._rng
        policy = {"store": False}

        def pick(values: list[str]) -> str:
            return values[rng.randrange(len(values))]

        def add_rule(number: int) -> None:
            send("POST", "rules", json={"name": f"bench-{number}", "order": number % 1000, "policy": policy})

        def change_rule(number: int) -> None:
            send("PUT", f"rules/rule-{rng.randrange(self._rules)}", json={"order": number, "policy": policy})

        def prompt(number: int) -> list[int]:
            held = self._held[number % len(self._held)]
            return held + [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS - len(held))]

        def look_up(number: int) -> None:
            send("POST", "lookup", json={"token_ids": prompt(number)})

        def prefetch(number: int) -> None:
            send("POST", "prefetch", json={"token_ids": prompt(number)}, allowed=(429,))

        def test_rule(number: int) -> None:
            # Every other one applies to all requests.
            match = {} if number % 2 else {"match": {"request": "batch-1-*"}}
            send("POST", "rules/test", json={"rule": {"name": "tried", "order": 0, "policy": policy, **match}})

        return {
            "GET /healthz": self._get("/healthz"),
            "GET /readyz": self._get("/readyz"),
            "GET /metrics": self._get("/metrics"),
            f"GET {ADMIN}/stats/history": self._get("stats/history", {"window_s": 900}, {"window_s": 86400}),
            f"GET {ADMIN}/rules": self._get("rules", {}, {"limit": 1000}, self._deep["rules"]),
            f"GET {ADMIN}/rules/{{name}}": lambda _: send("GET", f"rules/rule-{rng.randrange(self._rules)}"),
            f"POST {ADMIN}/rules": add_rule,
            f"POST {ADMIN}/rules/test": test_rule,
            f"PUT {ADMIN}/rules/{{name}}": change_rule,
            f"DELETE {ADMIN}/rules/{{name}}": lambda number: send("DELETE", f"rules/bench-{number}", allowed=(404,)),
            f"GET {ADMIN}/requests": self._get(
                "requests",
                {},
                {"limit": 1000},
                {"tenant": "0" * 16, "limit": 1},
                {"state": "finished", "missed": True},
                {"since": rfc3339(time.time())},
            ),
            f"GET {ADMIN}/requests/{{id}}": lambda number: send(
                "GET", f"requests/{pick(self.requests)}" if number % 2 else f"requests/{self._later()}", allowed=(404,)
            ),
            f"GET {ADMIN}/requests/{{id}}/policy": lambda number: send(
                "GET",
                f"requests/{pick(self.requests) if number % 2 else self._later()}/policy",
                allowed=(404,),
            ),
            f"PUT {ADMIN}/requests/{{id}}/policy": lambda number: send(
                "PUT", f"requests/later-{number}/policy", json=policy
            ),
            f"DELETE {ADMIN}/requests/{{id}}/policy": lambda number: send(
                "DELETE", f"requests/later-{number}/policy", allowed=(404,)
            ),
            f"PATCH {ADMIN}/policy": lambda number: send(
                "PATCH", "policy", json={"max_load_tokens": 1000 + number if number % 2 else None}
            ),
            f"GET {ADMIN}/blocks": self._get("blocks", {}, {"limit": 1000}, self._deep["blocks"]),
            f"GET {ADMIN}/blocks/{{hash}}": lambda _: send("GET", f"blocks/{pick(self.keys)}", allowed=(404,)),
            f"PUT {ADMIN}/blocks/{{hash}}/pin": lambda _: send("PUT", f"blocks/{pick(self.keys)}/pin", allowed=(404,)),
            f"DELETE {ADMIN}/blocks/{{hash}}/pin": lambda _: send(
                "DELETE", f"blocks/{pick(self.keys)}/pin", allowed=(404,)
            ),
            f"GET {ADMIN}/evictions": self._get("evictions", *self._evictions()),
            f"GET {ADMIN}/evictions/summary": self._get("evictions/summary", *windows),
            f"PATCH {ADMIN}/config": lambda number: send(
                "PATCH", "config", json={"eviction_policy": "arc" if number % 2 else "lru"}
            ),
            f"GET {ADMIN}/audit": self._get("audit", {}, {"limit": 1000}, self._deep["audit"]),
            f"GET {ADMIN}/tenants": self._get("tenants", {}, {"limit": 1000}, self._deep["tenants"]),
            f"GET {ADMIN}/tenants/{{tenant}}": lambda _: send("GET", f"tenants/{self._tenant()}"),
            f"PUT {ADMIN}/tenants/{{tenant}}": lambda number: send(
                "PUT", f"tenants/{self._tenant()}", json={"max_pool_bytes": number << 20}
            ),
            f"DELETE {ADMIN}/tenants/{{tenant}}": lambda number: send("DELETE", f"tenants/{digest(number)}"),
            f"GET {ADMIN}/tiers/{{name}}": lambda _: send("GET", f"tiers/{TIER}"),
            f"PUT {ADMIN}/tiers/{{name}}": lambda number: send(
                "PUT", f"tiers/{TIER}", json={"enabled": number % 2 == 1}
            ),
            f"POST {FLUSH}": lambda _: send("POST", f"tiers/{TIER}/flush", json={}),
            f"DELETE {FLUSH}": lambda _: self._end_flush(),
            f"POST {ADMIN}/lookup": look_up,
            f"POST {ADMIN}/prefetch": prefetch,
        }

    def before(self, route: str, number: int) -> None:
        """Make what a call of a route needs; this is not measured."""
        if route in OF_FLUSHES:
            self._send("PUT", f"tiers/{TIER}", json={"enabled": True})
            self._end_flush()
        if route == f"DELETE {FLUSH}":
            self._send("POST", f"tiers/{TIER}/flush", json={})
        if route == f"POST {ADMIN}/prefetch":
            # Else the pool has the blocks since the first call.
            for request in ("held-*", "prefetch-*"):
                self._send("POST", "reset", json={"tiers": ["host"], "match": {"request": request}})

    def store_held(self) -> None:
        """Store the prompts that are looked up in pool and tier, and let the tier keep them: others stay out of it."""
        for number, prompt in enumerate(self._held):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            self._send("POST", "/v1/completions", json=body, headers={"X-Request-ID": f"held-{number}"})
        self._send("PATCH", "policy", json={"tiers": []})


def admin_routes(http: httpx.Client) -> list[str]:
    """Return method and path of all routes but the engine's, and `HEAD`, which is answered as `GET`."""
    paths = http.get("/openapi.json").raise_for_status().json()["paths"]
    admin = {path: methods for path, methods in paths.items() if not path.startswith("/v1/")}
    return [f"{method.upper()} {path}" for path, methods in admin.items() for method in methods if method != "head"]


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_cpu(pid: int, call: Callable[[int], None], calls: int) -> float:
    """Return milliseconds of the service's CPU time per call, without that of its idle threads."""
    begun_s, before_s = time.monotonic(), cpu_s(pid)
    time.sleep(0.5)
    idle = (cpu_s(pid) - before_s) / (time.monotonic() - begun_s)
    begun_s, before_s = time.monotonic(), cpu_s(pid)
    for number in range(calls):
        call(number)
    taken_s = cpu_s(pid) - before_s - idle * (time.monotonic() - begun_s)
    return 1e3 * max(taken_s, 0.0) / calls


def timed(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    begun_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun_s)


def measure(address: str, pid: int, options: argparse.Namespace) -> tuple[dict[str, Times], list[str]]:
    """Return times by route, and what went wrong: routes for which there is no call, and calls that were refused."""
    found: dict[str, Times] = {}
    missing: list[str] = []
    with httpx.Client(base_url=address, timeout=60) as http:
        made = Calls(http, options)
        made.store_held()
        with loading(address, options.seed):
            time.sleep(options.warm_s)
            made.read_names()
            calls = made.of_routes()
            wanted: dict[str, Callable[[int], None]] = {}
            for route in admin_routes(http):
                if route in EXEMPT or not any(text in route for text in options.only):
                    continue
                if route in calls:
                    wanted[route] = calls[route]
                elif route.startswith("GET ") and "{" not in route:
                    wanted[route] = lambda _, path=route[4:]: http.get(path).raise_for_status()  # type: ignore[misc]
                else:
                    missing.append(route)
            for route, call in wanted.items():
                times = found[route] = Times()
                for number in range(options.calls):
                    made.before(route, number)
                    times.health.append(timed(lambda: http.get("/healthz")))
                    times.calls.append(timed(lambda call=call, number=number: call(number)))  # type: ignore[misc]
        time.sleep(2)
        for route, call in wanted.items():
            if route in OF_FLUSHES:
                continue
            found[route].cpu_ms = measure_cpu(pid, lambda number, call=call: call(number + options.calls), CPU_CALLS)  # type: ignore[misc]
    return found, [f"no call for {route}" for route in missing] + sorted(made.refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="of each route")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of history")
    parser.add_argument("--overrides", type=int, default=10_000)
    parser.add_argument("--rules", type=int, default=MAX_RULES - 200)
    parser.add_argument("--tenants", type=int, default=MAX_LIMITS, help="with limits of their own")
    parser.add_argument("--warm-s", type=float, default=10.0, help="seconds of load before the first call")
    parser.add_argument("--only", nargs="+", default=[""], help="only routes that contain one of these texts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load(options.load, options.seed)
        return
    print(environment("fastapi", "sqlalchemy"), f"seed {options.seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "kvferry.db"
        fill(path, options.rows)
        fill_policies(path, options.overrides, options.rules, options.tenants, options.rows // 10)
        with serving(folder, options.rows) as (address, pid):
            found, wrong = measure(address, pid, options)
    print(
        f"{options.rows:,} evictions, {options.overrides:,} overrides, {options.rules:,} rules, "
        f"{options.tenants:,} limits of tenants; {options.calls} calls each; "
        "milliseconds, and CPU milliseconds per call"
    )
    print(f"{'route':<40}{'median':>9}{'p95':>9}{'p99':>9}{'max':>9}{'CPU':>8}{'/healthz p99':>14}")
    for route, times in sorted(found.items(), key=lambda item: -(item[1].cpu_ms or 0.0)):
        calls = sorted(times.calls)
        p95, p99 = percentile(calls, 95), percentile(calls, 99)
        health = percentile(sorted(times.health), 99)
        note = "" if p99 <= GOAL_MS else "  over the goal" if health <= GOAL_MS else "  over, like /healthz"
        cpu = "-" if times.cpu_ms is None else f"{times.cpu_ms:.2f}"
        columns = f"{statistics.median(calls):>9.1f}{p95:>9.1f}{p99:>9.1f}{calls[-1]:>9.1f}"
        print(f"{route.replace(ADMIN, ''):<40}{columns}{cpu:>8}{health:>14.1f}{note}")
    print("\nnot measured: " + "; ".join(f"{route.replace(ADMIN, '')} ({why})" for route, why in EXEMPT.items()))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
