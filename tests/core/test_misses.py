"""Why prompt tokens had to be computed: each cause, and that they always add up to what was computed."""

from __future__ import annotations

import pytest

from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.keys import RequestFilter
from kvferry.core.policy import Override, RequestPolicy
from kvferry.core.scheduler.loads import Hit, Miss
from kvferry.core.stats import EvictionReason
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest
from tests.harness.toy_requests import answer, request, store_and_turn_over


def missed(engine: ToyEngine, name: str) -> dict[str, int]:
    """The causes that count for a request, which must add up to what it computed, and show in the totals."""
    view = engine.offload.requests.find(name, engine.now_s)
    causes = view.missed_tokens.flat()
    assert sum(causes.values()) == view.prompt_tokens.recomputed
    total = engine.offload.snapshot()
    assert sum(total.missed_tokens.flat().values()) == total.prompt_tokens.recomputed
    return {cause: tokens for cause, tokens in causes.items() if tokens}


def again(engine: ToyEngine, blocks: int = 5, **fields) -> dict[str, int]:
    """Answer a request of which the device has no block, and return its causes."""
    engine.device.forget_all()
    answer(engine, "again", blocks, **fields)
    return missed(engine, "again")


def test_misses_of_blocks_lost_while_waiting_are_new(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    # It had four blocks when they were first looked at, and has none of them by the time that there is room.
    assert engine.offload.match("r", 4 * BLOCK_SIZE, engine.now_s) == Miss()
    engine.run()
    assert missed(engine, "r") == {"new": 5 * BLOCK_SIZE, "tail": 1}


def test_a_full_hit_misses_its_tail_only(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    assert again(engine, extra=0) == {"tail": BLOCK_SIZE}


def test_block_beyond_the_cap_is_token_cap_while_others_wait_for_space() -> None:
    engine = ToyEngine(num_slots=1, num_blocks=64)
    engine.add(request("first", 3, max_tokens=50, kv_transfer_params={"max_offload_tokens": 2 * BLOCK_SIZE}))
    for _ in range(3):
        engine.step(copy=True)
    engine.device.forget_all()
    engine.add(request("again", 3))
    for _ in range(3):
        engine.step(copy=True)
    assert missed(engine, "again") == {"not_stored:no_space": BLOCK_SIZE, "not_stored:token_cap": BLOCK_SIZE, "tail": 1}


def test_misses_of_blocks_that_fill_while_others_wait_for_space_are_no_space() -> None:
    engine = ToyEngine(num_slots=1, num_blocks=64)
    engine.add(request("first", 4, max_tokens=50))
    for _ in range(4):
        engine.step(BLOCK_SIZE)
    engine.device.forget_all()
    assert again(engine, 4) == {"in_flight": BLOCK_SIZE, "not_stored:no_space": 3 * BLOCK_SIZE, "tail": 1}


@pytest.mark.parametrize("kind", [GroupKind.SLIDING, GroupKind.RECURRENT])
@pytest.mark.parametrize("mode", StoreMode)
def test_misses_after_an_abort_without_full_attention_are_new(mode: StoreMode, kind: GroupKind) -> None:
    window = (GroupSpec(BLOCK_SIZE, 64, kind, BLOCK_SIZE + 1 if kind is GroupKind.SLIDING else None),)
    engine = ToyEngine(num_slots=64, num_blocks=64, specs=window, null_block=0, store_mode=mode)
    engine.add(request("first", 10))
    engine.step(budget=4 * BLOCK_SIZE, copy=True)
    engine.finish(engine.requests["first"])
    causes = again(engine, 10)
    assert (causes["new"], causes["tail"]) == (6 * BLOCK_SIZE, 1)


def test_misses_of_an_answer_on_the_device_are_not_new() -> None:
    engine = ToyEngine(
        num_slots=64,
        num_blocks=64,
        specs=(GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 2 * BLOCK_SIZE),),
        null_block=0,
        store_mode=StoreMode.LAZY,
        watermark_blocks=1,
        settings=RequestPolicy(offload_prompt_only=False),
    )
    first = answer(engine, "turn-1", 2, extra=0, max_tokens=4 * BLOCK_SIZE + 1)
    for block_hash in first.block_hashes[:5]:
        engine.device.forget(engine.device.cached[0, block_hash])
    # Otherwise they would be stored for the request that wants them.
    engine.offload.pause_stores(True)
    tokens = [*first.tokens[: 6 * BLOCK_SIZE], 77]
    engine.add(ToyRequest("turn-2", tokens, len(tokens), 1))
    engine.run()
    assert missed(engine, "turn-2") == {"gap": 6 * BLOCK_SIZE, "tail": 1}


def test_misses_on_the_device_behind_a_gap_are_gap() -> None:
    engine = ToyEngine(num_slots=64, num_blocks=64, store_mode=StoreMode.LAZY, watermark_blocks=1)
    first = answer(engine, "first", 6)
    for block_hash in first.block_hashes[:2]:
        engine.device.forget(engine.device.cached[0, block_hash])
    engine.add(request("second", 6))
    engine.run()
    causes = missed(engine, "second")
    assert "new" not in causes
    assert causes["gap"] >= 4 * BLOCK_SIZE


def test_misses_of_a_prefix_that_is_being_computed_are_new() -> None:
    specs = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, BLOCK_SIZE + 1))
    engine = ToyEngine(num_slots=64, num_blocks=64, specs=specs, null_block=0, store_mode=StoreMode.LAZY)
    one = request("one", 4)
    engine.add(one)
    # vLLM's device finds blocks of full attention as soon as their compute is planned.
    for block, block_hash in enumerate(one.block_hashes, 40):
        engine.device.cache(0, block_hash, block)
    engine.run()
    assert missed(engine, "one") == {"new": 4 * BLOCK_SIZE, "tail": 1}


@pytest.mark.parametrize("cap", [0, BLOCK_SIZE - 1, BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE, 100 * BLOCK_SIZE])
def test_max_load_tokens_when_the_pool_has_more_caps_the_hit(cap: int) -> None:
    engine = ToyEngine(num_slots=64, num_blocks=64, settings=RequestPolicy(max_load_tokens=cap))
    store_and_turn_over(engine)
    loaded = min(cap // BLOCK_SIZE, 5) * BLOCK_SIZE
    wanted = {"load_disabled": 5 * BLOCK_SIZE - loaded, "new": BLOCK_SIZE, "tail": 1}
    assert again(engine, 6) == {cause: tokens for cause, tokens in wanted.items() if tokens}


def test_request_whose_hashes_leave_something_out_is_not_offloaded(engine: ToyEngine) -> None:
    """Neither an operator nor a client can change that: other requests' KV has the same keys."""
    store_and_turn_over(engine)
    engine.offload.policies.set_override(Override("again", {"load": True, "store": True}, engine.now_s + 100.0))
    stored = engine.offload.snapshot().store.stored
    engine.add(request("again", 6, unhashed="prompt_embeds"))
    engine.run()
    assert missed(engine, "again") == {"load_disabled": 6 * BLOCK_SIZE, "tail": 1}
    view = engine.offload.requests.find("again", engine.now_s)
    assert view.policy.sources["load"] == view.policy.sources["store"] == "engine:prompt_embeds"
    assert engine.offload.snapshot().store.stored == stored


def test_prompts_in_which_no_slot_fits_are_examined_by_block() -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=4)
    answer(engine, "first", 2, extra=3)
    assert missed(engine, "first") == {"new": 2 * BLOCK_SIZE, "tail": 3}
    assert again(engine, 3, extra=2) == {"not_stored:part_of_slot": 2 * BLOCK_SIZE, "new": BLOCK_SIZE, "tail": 2}


def test_misses_when_preempted_behind_the_prompt_keep_their_causes(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    engine.step()
    engine.preempt(engine.requests["r"])
    engine.run()
    assert missed(engine, "r") == {"new": 5 * BLOCK_SIZE, "tail": 1}


@pytest.mark.parametrize("sent", [{}, {"store": False, "load": False}])
def test_own_blocks_found_after_a_preemption_are_no_hits(engine: ToyEngine, sent: dict[str, bool]) -> None:
    answer(engine, "first", 2)
    engine.add(request("r", 10, kv_transfer_params=sent))
    engine.step(4 * BLOCK_SIZE)
    engine.step(1)
    engine.preempt(engine.requests["r"])
    if not sent:
        engine.device.forget_all()
    engine.run()
    assert missed(engine, "r") == {"new": 8 * BLOCK_SIZE, "tail": 1}
    tokens = engine.offload.requests.find("r", engine.now_s).prompt_tokens
    assert (tokens.device_hit, tokens.host_hit) == (2 * BLOCK_SIZE, 0)


def test_misses_when_the_pool_changes_meanwhile_are_the_latest(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    slots = engine.offload.manager.lookup(engine.offload.manager.table.keys[:5].tolist())
    engine.offload.manager.drop(slots[:1], EvictionReason.OPERATOR, engine.now_s)
    engine.add(request("second", 5))
    assert engine.offload.match("second", 0, engine.now_s) == Miss()
    engine.offload.manager.drop(slots[1:], EvictionReason.OPERATOR, engine.now_s)
    engine.run()
    assert missed(engine, "second") == {"evicted:operator": 5 * BLOCK_SIZE, "tail": 1}


def test_blocks_that_are_being_stored_are_in_flight(engine: ToyEngine) -> None:
    engine.add(request("first", 5))
    engine.step()
    engine.step()
    assert again(engine) == {"in_flight": 5 * BLOCK_SIZE, "tail": 1}


@pytest.mark.parametrize("ends", ["aborted", "running"])
def test_blocks_without_space_so_far_are_no_space(ends: str) -> None:
    engine = ToyEngine(num_slots=2, num_blocks=64)
    engine.add(request("first", 6, max_tokens=9))
    engine.step()
    if ends == "aborted":
        engine.preempt(engine.requests["first"])
        engine.finish(engine.requests["first"])
    assert again(engine, 6) == {"in_flight": 2 * BLOCK_SIZE, "not_stored:no_space": 4 * BLOCK_SIZE, "tail": 1}


def test_blocks_of_an_incomplete_slot_are_part_of_slot() -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=4)
    first = answer(engine, "first", 6)
    engine.device.forget_all()
    for name, num_shared, hit in (("longer", 6, 4), ("parting", 3, 0)):
        tokens = [*first.tokens[: num_shared * BLOCK_SIZE], *range(900, 901 + 5 * BLOCK_SIZE)]
        engine.add(ToyRequest(name, list(tokens), len(tokens), 1))
        assert engine.offload.match(name, 0, engine.now_s) == (Hit(hit * BLOCK_SIZE) if hit else Miss())
        engine.run()
        assert missed(engine, name) == {
            "not_stored:part_of_slot": (num_shared - hit) * BLOCK_SIZE,
            "new": 5 * BLOCK_SIZE,
            "tail": 1,
        }
        engine.device.forget_all()


def test_slots_with_a_block_under_another_store_are_in_flight() -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=2)
    first = request("first", 2)
    parting = [*first.tokens[:BLOCK_SIZE], *range(900, 901 + BLOCK_SIZE)]
    engine.add(first)
    engine.step()
    engine.add(ToyRequest("second", list(parting), len(parting), 1))
    engine.step()
    engine.run()
    engine.device.forget_all()
    engine.add(ToyRequest("third", parting, len(parting), 1))
    engine.run()
    assert missed(engine, "third") == {"not_stored:in_flight": 2 * BLOCK_SIZE, "tail": 1}


def test_blocks_that_a_reset_met_while_they_were_stored_are_reset(engine: ToyEngine) -> None:
    engine.add(request("first", 5))
    engine.step()
    engine.reset(RequestFilter(request="first"))
    engine.run()
    assert again(engine) == {"not_stored:reset": 5 * BLOCK_SIZE, "tail": 1}


def test_blocks_behind_the_longest_hit_are_tail_in_slots_too() -> None:
    specs = [GroupSpec(6, 96), GroupSpec(4, 64)]
    engine = ToyEngine(64, 64, specs=specs, blocks_per_slot=8, hash_block_size=2)
    tokens = list(range(48))
    engine.add(ToyRequest("first", list(tokens), 48, 1, hash_block_size=2))
    engine.step(42)
    engine.finish(engine.requests["first"])
    engine.run()
    engine.device.forget_all()
    engine.add(ToyRequest("second", list(tokens), 48, 1, hash_block_size=2))
    engine.run()
    assert missed(engine, "second") == {"not_stored:part_of_slot": 36, "tail": 12}


def test_no_more_than_the_block_left_out_is_the_tail_of_a_slot() -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=3, skips_last_block=True, store_mode=StoreMode.LAZY, watermark_blocks=0)
    answer(engine, "first", 6)
    for block_id in list(engine.device.names)[4:]:
        engine.device.forget(block_id)
    answer(engine, "again", 6, kv_transfer_params={"load": False})
    assert missed(engine, "again") == {"gap": 2 * BLOCK_SIZE, "tail": BLOCK_SIZE + 1}
