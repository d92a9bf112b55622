"""Which blocks of sliding-window groups are stored: the windows before the points that another prompt can resume at."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.keys import make_keys
from tests.harness.toy_engine import BLOCK_SIZE, Habits, ToyEngine, ToyRequest

WINDOW_TOKENS = 2 * BLOCK_SIZE + 1
HEAD_BLOCKS = 10
SPECS = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, WINDOW_TOKENS))


def make_engine(**options) -> ToyEngine:
    return ToyEngine(
        num_slots=1000,
        null_block=0,
        cost_model=LoadOrCompute(LoadDecision.ALWAYS),
        habits=Habits(allocates_ahead=False),
        **{"num_blocks": 100, "specs": SPECS, **options},
    )


def prompt(name: str, tail: int, head: int = 0, blocks: int = HEAD_BLOCKS) -> ToyRequest:
    """A head of whole blocks that all prompts with this `head` share, and nine blocks of its own."""
    tokens = [*range(head, head + blocks * BLOCK_SIZE), *range(tail, tail + 9 * BLOCK_SIZE + 1)]
    return ToyRequest(name, tokens, len(tokens), 1)


def answer(engine: ToyEngine, one: ToyRequest, budget: int = 32) -> int:
    """Compute a prompt, and return how many of its tokens came from the pool."""
    engine.add(one)
    while one.state != "finished":
        engine.step(budget, copy=True)
        engine.deliver([])
    engine.check()
    return engine.offload.requests.find(one.request_id, engine.now_s).prompt_tokens.host_hit


def stored_blocks(engine: ToyEngine, one: ToyRequest, group: int) -> set[int]:
    found = engine.manager.lookup_each(make_keys(one.block_hashes, group)) >= 0
    return set(np.flatnonzero(found).tolist())


@pytest.mark.parametrize("specs", [SPECS, SPECS[1:]])
@pytest.mark.parametrize("budget", [4, 7, 32, 1000])
def test_shared_prefix_when_a_second_prompt_had_it_serves_the_third(specs: tuple[GroupSpec, ...], budget: int) -> None:
    engine = make_engine(specs=specs)
    hits = []
    for number in range(1, 4):
        hits.append(answer(engine, prompt(f"r{number}", 1000 * number), budget))
        engine.device.forget_all()
    assert hits == [0, 0, HEAD_BLOCKS * BLOCK_SIZE]


@pytest.mark.parametrize("specs", [SPECS, SPECS[1:]])
def test_shared_prefix_with_draft_layers_serves_all_but_its_last_block(specs: tuple[GroupSpec, ...]) -> None:
    engine = make_engine(specs=specs, skips_last_block=True)
    hits = []
    for number in range(1, 4):
        hits.append(answer(engine, prompt(f"r{number}", 1000 * number)))
        engine.device.forget_all()
    again = answer(engine, prompt("again", 3000))
    assert [*hits, again] == [0, 0, (HEAD_BLOCKS - 1) * BLOCK_SIZE, (HEAD_BLOCKS + 8) * BLOCK_SIZE]


def test_shared_prefix_when_blocks_left_in_lazy_mode_serves_the_third() -> None:
    engine = make_engine(num_blocks=48, store_mode=StoreMode.LAZY, watermark_blocks=32)
    hits = []
    for number in range(1, 4):
        hits.append(answer(engine, prompt(f"r{number}", 1000 * number)))
        for other in range(3):
            answer(engine, prompt(f"f{number}{other}", 10000, head=100_000 * (10 * number + other)))
    assert hits == [0, 0, HEAD_BLOCKS * BLOCK_SIZE]


def test_shared_prefix_when_only_the_device_has_it_is_stored_as_boundary() -> None:
    engine = make_engine(store_mode=StoreMode.LAZY)
    answer(engine, prompt("first", 1000))
    engine.set_mode(StoreMode.EAGER)
    # The device lost the first prompt's windows, as vLLM does, and has its blocks of full attention.
    for group, block_hash in [name for name in engine.device.cached if name[0] == 1]:
        engine.device.forget(engine.device.cached[group, block_hash])
    second = prompt("second", 2000)
    answer(engine, second)
    assert {HEAD_BLOCKS - 2, HEAD_BLOCKS - 1} <= stored_blocks(engine, second, 1)


@pytest.mark.parametrize("specs", [SPECS, SPECS[1:]])
@pytest.mark.parametrize("mode", StoreMode)
def test_misses_when_only_a_window_is_missing_are_gaps(specs: tuple[GroupSpec, ...], mode: StoreMode) -> None:
    engine = make_engine(specs=specs, store_mode=mode)
    answer(engine, prompt("r1", 1000))
    for name in [name for name in engine.device.cached if name[0] == len(specs) - 1]:
        engine.device.forget(engine.device.cached[name])
    answer(engine, prompt("r2", 2000))
    missed = engine.offload.requests.find("r2", engine.now_s).missed_tokens.flat()
    assert (missed["gap"], missed["new"]) == (HEAD_BLOCKS * BLOCK_SIZE, 9 * BLOCK_SIZE)


@pytest.mark.parametrize("budget", [4, 8, 32])
def test_windows_when_prefilled_in_chunks_are_stored_at_the_end_only(budget: int) -> None:
    engine = make_engine()
    one = prompt("one", 1000)
    answer(engine, one, budget)
    assert stored_blocks(engine, one, 0) == set(range(19))
    assert stored_blocks(engine, one, 1) == {17, 18}
    assert engine.offload.snapshot().store.offered == 21


def test_windows_when_prompts_part_twice_are_stored_at_both_points() -> None:
    engine = make_engine()
    answer(engine, prompt("first", 1000))
    answer(engine, prompt("second", 2000))
    engine.device.forget_all()
    shorter = prompt("third", 3000, blocks=5)
    answer(engine, shorter)
    assert stored_blocks(engine, shorter, 1) == {3, 4, 12, 13}


def test_window_when_a_prompt_is_aborted_midway_serves_its_retry() -> None:
    engine = make_engine()
    one = prompt("one", 1000)
    engine.add(one)
    for _ in range(5):
        engine.step(8, copy=True)
    engine.finish(one)
    engine.step(copy=True)
    engine.device.forget_all()
    assert answer(engine, prompt("again", 1000)) == 5 * 8


def test_blocks_before_a_loaded_window_when_capped_are_not_stored() -> None:
    engine = make_engine()
    engine.habits = Habits(fills_passed=True, drops_passed=False)
    answer(engine, prompt("first", 1000))
    engine.device.forget_all()
    capped = prompt("second", 1000)
    capped.kv_transfer_params = {"max_offload_tokens": 9}
    # The engine allocated blocks for what a window passed before the end of the hit, and nothing was loaded into them.
    assert answer(engine, capped) == 19 * BLOCK_SIZE
    assert stored_blocks(engine, capped, 1) == {17, 18}
