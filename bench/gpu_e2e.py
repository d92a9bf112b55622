"""Time to first token and throughput of the embedded engine on a GPU, by what serves the prompt.

    python -m bench.gpu_e2e --json e2e.json       on a GPU, with a random model of the shape of 8 billion parameters
    python -m bench.gpu_e2e --reduced             on the CPU, with `tiny`: the script alone

The model is written to a temporary folder first, 16 GB of it. Each prompt is random; it is asked cold, again at once,
and once more after other prompts have taken the device's cache. Throughput is that of conversations whose turns take
turns, more of them than the device holds, with offload and without, under different salts. Answers must be the same
token by token in float64; in bfloat16 a prompt that is cut into other chunks may round otherwise, so it is counted.

What is found is printed and written as soon as it is found, and a part that fails takes no other with it. What
`--reduced` prints are no speeds of a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu_vllm import LLAMA_8B
from bench.parts import Parts
from bench.report import environment, spread
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.model import TINY
from kvferry.app.engines.embedded.request import ClientOptions, SamplingParams
from kvferry.app.serve.process import Process
from kvferry.app.settings import Settings
from kvferry.app.telemetry.logs import start_logging

SETTLE_S = 120.0
WITHOUT = {"store": False, "load": False}


@dataclass
class Scale:
    settings: dict[str, Any]
    prompts: list[int]
    answer_tokens: int
    conversations: int
    turns: int
    turn_tokens: int
    rounds: int


FULL = Scale(
    {"device": "cuda", "dtype": "bfloat16", "device_blocks": 2560, "pool_bytes": "24GiB", "max_batched_tokens": 4096},
    [1024, 4096, 16_384, 32_768],
    16,
    16,
    3,
    1500,
    3,
)
REDUCED = Scale(
    {"device": "cpu", "dtype": "float64", "device_blocks": 24, "pool_bytes": "64MiB", "max_batched_tokens": 128},
    [64, 200],
    4,
    4,
    2,
    60,
    2,
)


@dataclass
class FirstToken:
    """Seconds to the first token by round, and whether the answers equal those of the cold prompt."""

    prompt_tokens: int
    cold_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    host_tokens: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)


def save_8b(folder: Path) -> None:
    """Save a random Llama of 8 billion parameters, generated on the fastest device."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_8B)).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


@dataclass
class Found:
    """All results so far."""

    where: str
    seed: int
    first_tokens: list[FirstToken] = field(default_factory=list)
    throughput: dict[str, Any] = field(default_factory=dict)


class Bench:
    def __init__(self, process: Process, engine: EmbeddedEngine, scale: Scale, found: Found) -> None:
        self.process, self.engine, self.scale, self.found = process, engine, scale, found
        self.rng = np.random.default_rng(found.seed)

    def prompt(self, num_tokens: int) -> list[int]:
        tokens: list[int] = self.rng.integers(3, min(self.engine.model.vocab_size, 250), num_tokens).tolist()
        return tokens

    async def ask(self, prompt: Sequence[int], **more: Any) -> tuple[float, list[int], int]:
        """Return the seconds to the first token, the answer, and the number of cached prompt tokens."""
        started_s = time.perf_counter()
        first_s, tokens, cached = 0.0, [], 0
        sampling = SamplingParams(max_tokens=self.scale.answer_tokens, temperature=0.0, ignore_eos=True)
        async for _, delta in self.engine.submit(prompt, sampling, options=ClientOptions(**more)):
            if not tokens:
                first_s = time.perf_counter() - started_s
            tokens += delta.token_ids
            cached = delta.num_cached_tokens
        if len(tokens) != self.scale.answer_tokens:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens got {len(tokens)} of {self.scale.answer_tokens}")
        return first_s, tokens, cached

    def settle(self) -> None:
        end_s = time.monotonic() + SETTLE_S
        while self.process.service.scheduler.snapshot().open_jobs:
            if time.monotonic() > end_s:
                raise RuntimeError(f"transfers did not end within {SETTLE_S:.0f} s")
            time.sleep(0.005)

    def flush_device(self) -> None:
        """Use every device block for content that is not stored in the pool."""
        limit = self.engine.max_model_len - self.scale.answer_tokens
        held = self.engine.settings.device_blocks * self.engine.settings.block_size
        for _ in range(-(-held // limit)):
            asyncio.run(self.ask(self.prompt(limit), kv_transfer_params=WITHOUT))

    def warm_up(self) -> None:
        """Trigger compilation, and allocations of the first use."""
        asyncio.run(self.ask(self.prompt(self.scale.prompts[0])))
        self.settle()

    def first_token(self, num_tokens: int) -> None:
        """Measure rounds of one length, and print each."""
        figures = FirstToken(num_tokens)
        for _ in range(self.scale.rounds):
            prompt = self.prompt(num_tokens)
            cold_s, cold, _ = asyncio.run(self.ask(prompt))
            device_s, warm, _ = asyncio.run(self.ask(prompt))
            self.settle()
            self.flush_device()
            before = self.process.service.scheduler.snapshot().prompt_tokens.host_hit
            host_s, again, _ = asyncio.run(self.ask(prompt))
            figures.host_tokens.append(self.process.service.scheduler.snapshot().prompt_tokens.host_hit - before)
            figures.cold_s.append(cold_s)
            figures.device_s.append(device_s)
            figures.host_s.append(host_s)
            figures.same.append(cold == warm == again)
            if len(figures.same) == 1:
                self.found.first_tokens.append(figures)
        share = min(figures.host_tokens) / num_tokens
        columns = " | ".join(map(spread, (figures.cold_s, figures.device_s, figures.host_s)))
        print(f"| {num_tokens} | {columns} | {share:.2f} | {sum(figures.same)} of {len(figures.same)} |", flush=True)

    def throughput(self) -> None:
        """Measure tokens per second, prompts and answers, of the same conversations with and without offloading."""
        script = [
            [self.prompt(self.scale.turn_tokens) for _ in range(self.scale.turns)]
            for _ in range(self.scale.conversations)
        ]
        rates: dict[str, float] = {}
        answers: dict[str, list[list[int]]] = {}
        for arm, params in (("without", WITHOUT), ("with", None)):

            async def talk(arm: str = arm, params: dict[str, bool] | None = params) -> int:
                texts: list[list[int]] = [[] for _ in script]
                total = 0
                for turn in range(self.scale.turns):
                    for text, said in zip(texts, script, strict=True):
                        text += said[turn]
                    asked = [self.ask(text, cache_salt=arm, kv_transfer_params=params) for text in texts]
                    for text, (_, tokens, _) in zip(texts, await asyncio.gather(*asked), strict=True):
                        total += len(text) + len(tokens)
                        text += tokens
                answers[arm] = texts
                return total

            started_s = time.perf_counter()
            total = asyncio.run(talk())
            rates[arm] = total / (time.perf_counter() - started_s)
            self.settle()
        same = sum(one == other for one, other in zip(answers["with"], answers["without"], strict=True))
        self.found.throughput = {"tokens_per_s": rates, "same": same, "conversations": len(script)}
        print(
            f"\n{len(script)} conversations, tokens/s: {rates['without']:.0f} without offload, "
            f"{rates['with']:.0f} with; same answers in {same}",
            flush=True,
        )


def serve(options: argparse.Namespace, scale: Scale, found: Found, parts: Parts) -> None:
    """Run all measurements that need an engine."""
    with tempfile.TemporaryDirectory() as folder:
        model = TINY
        if not options.reduced:
            model = str(Path(folder) / "model")
            save_8b(Path(model))
        settings = Settings(
            _env_file=None,
            model=model,
            state_dir=str(Path(folder) / "state"),
            log_level="error",
            load_decision="always",
            **scale.settings,
        )
        with start_logging(settings) as logs:
            process = Process(settings, logs)
            process.start()
            try:
                engine = process.engine
                if engine is None:
                    raise RuntimeError("the process has no engine")
                found.where = f"{environment('torch', 'transformers')}, {engine.model.device}, {engine.model.dtype}"
                if settings.device != "cpu":
                    found.where += f", {torch.cuda.get_device_name()}"
                print(f"{found.where}, seed {options.seed}, ready with {parts.left_s:.0f} s left\n", flush=True)
                bench = Bench(process, engine, scale, found)
                parts.run("warming up", bench.warm_up)
                print("| prompt tokens | cold, s | device cache, s | host pool, s | from the host | same answers |")
                print("| --- | --- | --- | --- | --- | --- |", flush=True)
                for num_tokens in scale.prompts:
                    parts.run(f"{num_tokens} tokens", lambda n=num_tokens: bench.first_token(n))  # type: ignore[misc]
                parts.run("throughput", bench.throughput)
            finally:
                process.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="on the CPU, with the model tiny")
    parser.add_argument("--json", type=Path, help="where to write all figures, as they come")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no part begins after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scale = REDUCED if options.reduced else FULL
    found = Found("", options.seed)
    parts = Parts(lambda: asdict(found), options.json, options.budget_s)
    parts.run("engine", lambda: serve(options, scale, found, parts))
    sys.exit(parts.conclude())


if __name__ == "__main__":
    main()
