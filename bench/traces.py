"""Engine-thread cost of traces: microseconds of CPU time a request in the scheduler's hooks.

Run: python -m bench.traces [--rounds 25] [--requests 400]

Each request loads a hit of 20 blocks, stores 4 blocks and computes two steps. The cases, measured alternately, are
requests of a service without traces, unsampled ones and sampled ones of a service with traces, and in vLLM, where the
decision is made on the engine thread, unsampled ones with it. The first is the baseline. Spans are made and sent by
another thread, which does not run here.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import environment, spread
from kvferry.app.process import NoDevice
from kvferry.app.traces import Traces
from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.engine_api import StepProgress
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import Hit, OffloadScheduler
from kvferry.core.transfers import TransferJob, TransferResult

BLOCK, HIT_BLOCKS, NEW_BLOCKS = 16, 20, 4
PROMPTS = 50
SAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
UNSAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"}
_numbers = itertools.count()


@dataclass
class BenchRequest:
    """A request of a prompt that is in the pool, and an end that is not."""

    request_id: str
    block_hashes: list[bytes]
    trace: Any = None
    num_prompt_tokens: int = (HIT_BLOCKS + NEW_BLOCKS) * BLOCK + 1
    num_tokens: int = (HIT_BLOCKS + NEW_BLOCKS) * BLOCK + 1
    tenant: None = None
    lora: None = None
    aliases: tuple[str, ...] = ()
    kv_transfer_params: None = None


def make_scheduler() -> OffloadScheduler:
    layout = GroupLayout([GroupSpec(BLOCK, 4096)])
    manager = OffloadManager(20_000, layout.slot_bytes)
    policies = PolicyResolver(RequestPolicy(), {}, manager.lock)
    return OffloadScheduler(manager, policies, NoDevice(), layout, cost_model=LoadOrCompute(LoadDecision.ALWAYS))


def make_request(prompt: int, trace: Any) -> BenchRequest:
    number = next(_numbers)
    hashes = [b"p%031d" % (prompt * 1000 + i) for i in range(HIT_BLOCKS)]
    return BenchRequest(f"r{number}", hashes + [b"n%031d" % (number * 10 + i) for i in range(NEW_BLOCKS)], trace)


def serve(scheduler: OffloadScheduler, request: BenchRequest, now_s: float) -> int:
    """Run one request through all hooks; return the tokens of its hit."""
    name, table = request.request_id, (list(range(HIT_BLOCKS + NEW_BLOCKS + 1)),)
    scheduler.on_new_request(request, now_s)
    found = scheduler.match(name, 0, now_s)
    num_tokens = found.num_tokens if isinstance(found, Hit) else 0
    scheduler.commit(name, table, num_tokens, now_s)
    end(scheduler, scheduler.plan_step([], now_s).jobs, now_s + 0.001)
    jobs = scheduler.plan_step([StepProgress(name, table, request.num_prompt_tokens)], now_s + 0.002).jobs
    end(scheduler, jobs, now_s + 0.003)
    scheduler.plan_step([], now_s + 0.003)
    scheduler.on_request_finished(name, now_s + 0.004)
    return num_tokens


def end(scheduler: OffloadScheduler, jobs: Sequence[TransferJob], now_s: float) -> None:
    scheduler.on_transfers_finished([TransferResult(job.job_id, num_bytes=4096, seconds=1e-4) for job in jobs], now_s)


def measure(num_requests: int, trace_of: Callable[[], Any], traces: Traces, *, decides_in_time: bool) -> float:
    """Return microseconds a request."""
    scheduler = make_scheduler()
    for prompt in range(PROMPTS):
        serve(scheduler, make_request(prompt, None), 1000.0)
    made = [make_request(i % PROMPTS, None if decides_in_time else trace_of()) for i in range(num_requests)]
    gc.collect()
    gc.disable()
    started, num_tokens = time.thread_time(), 0
    for number, request in enumerate(made):
        if decides_in_time:
            request.trace = trace_of()
        num_tokens += serve(scheduler, request, 1001.0 + number)
    taken_s = time.thread_time() - started
    gc.enable()
    if num_tokens != num_requests * HIT_BLOCKS * BLOCK:
        raise RuntimeError(f"{num_tokens} tokens were loaded")
    traces._queue.clear()
    return taken_s / num_requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    traces = Traces("bench", "tiny")

    def begin(headers: dict[str, str]) -> Any:
        call = traces.begin(headers, 1000.0)
        return None if call is None else call.request()

    cases: dict[str, tuple[Callable[[], Any], bool]] = {
        "no traces": (lambda: None, False),
        "unsampled": (lambda: begin(UNSAMPLED), False),
        "sampled": (lambda: begin(SAMPLED), False),
        "unsampled, decided on the engine thread": (lambda: begin(UNSAMPLED), True),
        "sampled, decided on the engine thread": (lambda: begin(SAMPLED), True),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, (trace_of, decides_in_time) in cases.items():
            times[name].append(measure(options.requests, trace_of, traces, decides_in_time=decides_in_time))
    print(environment("numpy", "opentelemetry-sdk"))
    print(f"microseconds of CPU time a request in all hooks, {options.requests} requests a round: median (min-max)")
    base = times["no traces"]
    for name, found in times.items():
        ratios = [one / other for one, other in zip(found, base, strict=True)]
        least = min(found) / min(base)
        print(f"{name:<42}{spread(found, 1):<28}ratio {spread(ratios)}, of the shortest rounds {least:.3f}")


if __name__ == "__main__":
    main()
