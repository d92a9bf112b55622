"""kvferry inside a real vLLM engine in this process: the same answers, from host memory."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvferry.app.service.server import url_of
from kvferry.core.engine_api import StoreMode
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import DEVICE_BLOCKS, InProcess, in_process, transfer_config
from tests.vllm.workload import BLOCK, Answer, Prompt, assert_same, count_different, random_tokens, shared_prefixes
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

PROMPTS = shared_prefixes(200)


@pytest.fixture
def engine(llama: Path) -> Iterator[InProcess]:
    with in_process(llama, transfer_config()) as engine:
        yield engine
        assert_nothing_left(engine)


def assert_nothing_left(engine: InProcess, device_blocks: int = DEVICE_BLOCKS) -> None:
    """No pin, no held block, no open job."""
    after = engine.settle()
    assert after.pool.pinned == after.pool.loading == after.open_jobs == 0
    assert after.requests.running == after.requests.waiting_for_load == 0
    assert engine.scheduler.device.num_held == 0
    assert engine.pool.get_num_free_blocks() == device_blocks - 1


def full_blocks(prompts: list[Prompt]) -> int:
    """Distinct full blocks of these prompts."""
    return len({tuple(prompt[: end * BLOCK]) for prompt in prompts for end in range(1, len(prompt) // BLOCK + 1)})


def test_200_prompts_in_eager_mode_get_the_same_answers(engine: InProcess, truth: list[Answer]) -> None:
    assert full_blocks(PROMPTS) > 2 * DEVICE_BLOCKS
    assert_same(engine.generate(PROMPTS), truth)
    first = engine.settle()
    assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    assert first.store.stored == full_blocks(PROMPTS)
    assert after.load.blocks > 2 * DEVICE_BLOCKS
    assert after.prompt_tokens.host_hit > 0


@pytest.mark.parametrize(("device_blocks", "step_tokens"), [(DEVICE_BLOCKS, 512), (2 * DEVICE_BLOCKS, 128)])
def test_lazy_mode_caches_as_many_tokens_as_eager_mode(
    llama: Path, truth: list[Answer], device_blocks: int, step_tokens: int
) -> None:
    prompts = PROMPTS[:80]
    cached = {}
    for mode in ("eager", "lazy"):
        transfer = transfer_config(store_mode=mode, load_decision="always")
        size = {"num_gpu_blocks_override": device_blocks, "max_num_batched_tokens": step_tokens}
        with in_process(llama, transfer, **size) as engine:
            answers = [answer for _ in range(2) for answer in engine.generate(prompts)]
            assert_same(answers, 2 * truth[:80])
            after = engine.settle()
            cached[mode] = sum(answer.num_cached for answer in answers)
            assert after.store.skipped["left_device"] == 0
            assert_nothing_left(engine, device_blocks)
    assert cached["lazy"] >= 0.98 * cached["eager"]


@pytest.mark.parametrize("mode", list(StoreMode))
def test_blocks_of_a_lease_outlast_other_prompts_and_an_abort_has_none(
    mode: StoreMode, llama: Path, truth: list[Answer]
) -> None:
    transfer = transfer_config(store_mode=mode.value, load_decision="always", request_fields=["retain_s"])
    with in_process(llama, transfer) as engine:
        assert_same(engine.generate(PROMPTS[:1], params={"retain_s": 3000.0}), truth[:1])
        leases = [view.lease for view in engine.core.requests.page(None, 5, 0.0)]
        assert [None if one is None else one.outcome.value for one in leases] == ["accepted"]
        assert leases[0] is not None
        assert leases[0].num_blocks == len(PROMPTS[0]) // BLOCK
        engine.generate(PROMPTS[1:40])
        engine.forget_device()
        counts = engine.snapshot().leases
        assert counts.slots + counts.pending == leases[0].num_blocks
        engine.core.policies.set_runtime({"retain_s": 3000.0})
        engine.add("aborted", PROMPTS[50], max_tokens=40)
        engine.step()
        engine.engine.abort_request(["aborted"])
        engine.step()
        assert engine.snapshot().leases.outcomes["accepted"] == 1
        (aborted,) = engine.core.requests.page(None, 1, 0.0)
        assert (aborted.phase.value, aborted.lease) == ("finished", None)
        engine.core.resets.reset(0.0)
        assert_nothing_left(engine)


def test_blocks_dropped_by_a_prefix_cache_reset_are_not_stored(llama: Path, truth: list[Answer]) -> None:
    with in_process(llama, transfer_config(store_mode="lazy", load_decision="always")) as engine:
        assert_same(engine.generate(PROMPTS[:4]), truth[:4])
        engine.forget_device()
        before = engine.settle().store
        assert_same(engine.generate(PROMPTS[4:30]), truth[4:30])
        assert engine.settle().store.skipped["left_device"] > 0 == before.skipped["left_device"]
        assert_same(engine.generate(PROMPTS[:4]), truth[:4])
        assert_nothing_left(engine)


def test_blocks_that_only_the_device_has_are_stored_for_a_request(llama: Path, truth: list[Answer]) -> None:
    prompt, num_stored = PROMPTS[0], 2
    with in_process(llama, transfer_config(load_decision="always")) as engine:
        engine.generate([prompt[: num_stored * BLOCK + 1]])
        engine.settle()
        engine.core.set_store_mode(StoreMode.LAZY)
        engine.generate([prompt])
        assert engine.settle().store.stored == num_stored
        stored = engine.core.manager.table.keys[:num_stored].tolist()
        contents = engine.scheduler.device.contents(range(DEVICE_BLOCKS))
        engine.pool.evict_blocks({block for block, key in enumerate(contents) if key in stored})
        answers = engine.generate([prompt])
        assert_same(answers, truth[:1])
        assert answers[0].num_cached == (len(prompt) - 1) // BLOCK * BLOCK
        assert engine.settle().prompt_tokens.host_hit == answers[0].num_cached
        assert_nothing_left(engine)


def test_answers_while_the_pool_is_resized_are_the_same(engine: InProcess, truth: list[Answer]) -> None:
    mib, answers, num_steps = 1 << 20, dict[str, Answer](), 0
    sizes = itertools.cycle(size * mib for size in (16, 256, 32, 64, 512, 16, 128))
    with httpx.Client(base_url=engine.connector._the_core().admin_url, timeout=DEADLINE_S) as admin:

        def resize(num_bytes: int) -> None:
            admin.patch("/admin/v1/config", json={"pool_bytes": num_bytes}).raise_for_status()

        def is_there(num_bytes: int) -> bool:
            engine.step()
            pool = engine.snapshot().pool
            return pool.bytes == num_bytes and pool.slots == pool.wanted_slots

        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt)
        while engine.engine.has_unfinished_requests():
            answers.update(engine.step())
            num_steps += 1
            if num_steps % 20 == 0:
                resize(next(sizes))
        assert_same([answers[str(number)] for number in range(len(PROMPTS))], truth)
        for size in (16 * mib, 48 * mib):
            resize(size)
            wait_until(lambda: is_there(size), "the size", 60.0)  # noqa: B023
        engine.forget_device()
        assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    assert after.evictions.by_reason["shrink"] > 0
    assert after.load.blocks > 0
    assert (after.store.failed, after.load.failed) == (0, 0)
    assert sum(extent for extent in engine.copies._pool.extent_slots) * after.pool.slot_bytes == 48 * mib


def test_lookup_says_what_a_request_would_find(engine: InProcess, truth: list[Answer]) -> None:
    prompt = PROMPTS[0]
    with httpx.Client(base_url=engine.connector._the_core().admin_url, timeout=DEADLINE_S) as admin:

        def look_up(**body: object) -> dict[str, object]:
            answer = admin.post("/admin/v1/lookup", json={"token_ids": list(prompt), **body}).raise_for_status()
            return {name: answer.json()[name] for name in ("device", "pool", "anywhere")}

        assert look_up() == {"device": 0, "pool": 0, "anywhere": 0}
        engine.generate([prompt], cache_salt="a-salt")
        engine.settle()
        whole = len(prompt) // BLOCK * BLOCK
        assert look_up() == {"device": 0, "pool": 0, "anywhere": 0}
        assert look_up(cache_salt="a-salt") == {"device": whole, "pool": whole, "anywhere": whole}
        engine.forget_device()
        assert look_up(cache_salt="a-salt") == {"device": 0, "pool": whole, "anywhere": whole}
    (answer,) = engine.generate([prompt], cache_salt="a-salt")
    assert_same([answer], truth[:1])
    assert answer.num_cached == (len(prompt) - 1) // BLOCK * BLOCK


def test_counters_of_vllm_agree_with_kvferrys(engine: InProcess) -> None:
    hits, queries = "vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"
    for start in range(0, 80, 4):
        engine.generate(PROMPTS[start : start + 4])
    engine.settle()
    engine.generate([PROMPTS[0]])
    ours = engine.settle()
    assert ours.requests.preempted == 0
    assert engine.metric(hits) == ours.prompt_tokens.host_hit > 0
    assert engine.metric(queries) == ours.prompt_tokens.total - ours.prompt_tokens.device_hit
    assert engine.metric("vllm:kvferry_loaded_bytes") == ours.load.bytes == ours.load.blocks * ours.pool.slot_bytes
    assert engine.metric("vllm:kvferry_stored_bytes") == ours.store.bytes == ours.store.stored * ours.pool.slot_bytes
    assert engine.metric("vllm:kv_offload_load_bytes") == ours.load.bytes
    assert engine.metric("vllm:kv_offload_store_bytes") == ours.store.bytes


def test_metrics_when_their_port_is_taken_have_another(llama: Path, truth: list[Answer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with in_process(llama, transfer_config(metrics_port=port)) as engine:
            assert_same(engine.generate(PROMPTS[:2]), truth[:2])
            address = url_of(engine.connector._the_core()._metrics)
            assert not address.endswith(f":{port}")
            assert 'engine="vllm"' in httpx.get(f"{address}/metrics", timeout=DEADLINE_S).text
            assert httpx.get(f"{address}/admin/v1/stats", timeout=DEADLINE_S).status_code == 404


def test_control_other_bytes_in_the_pool_change_answers(engine: InProcess, truth: list[Answer]) -> None:
    """Every slot gets the bytes of another: any bytes may be no numbers, at which a GPU's kernels stop."""
    engine.generate(PROMPTS)
    engine.forget_device()
    slots = [engine.copies.slot(slot) for slot in range(engine.snapshot().pool.ready)]
    first = slots[0].copy()
    for slot, following in itertools.pairwise(slots):
        slot[:] = following
    slots[-1][:] = first
    different = count_different(engine.generate(PROMPTS), truth)
    assert different > len(PROMPTS) // 2


def test_a_span_that_changes_near_the_front_is_a_break(llama: Path) -> None:
    head, body = random_tokens(random.Random(5), 100), random_tokens(random.Random(6), 300)
    prompts = [[*head, *span, *body] for span in ([11, 12], [13, 14, 15])]
    with in_process(llama, transfer_config(explain_bytes="16MiB")) as engine:
        for prompt in prompts:
            engine.generate([prompt])
        engine.settle()
        with httpx.Client(base_url=engine.connector._the_core().admin_url, timeout=DEADLINE_S) as admin:
            wait_until(lambda: bool(admin.get("/admin/v1/breaks").json()["items"]), "the prompts are compared")
            (found,) = admin.get("/admin/v1/breaks").json()["items"]
    assert (found["position"], found["exact"], found["token_ids"]) == (100, True, [[11, 12], [13, 14, 15]])
    assert found["texts"] is None, "no tokenizer is at hand"
    assert 250 < found["tokens"] <= 300


def test_kv_hints_are_counted_and_a_session_is_reset_alone(llama: Path) -> None:
    prompts = [random_tokens(random.Random(seed), 4 * BLOCK + 3) for seed in range(3)]
    actions = [KvHintAction(f"a{number}", kind, "1", {}) for number, kind in enumerate(["pin", "pin", "drop all"])]
    with in_process(llama, transfer_config()) as engine:
        for number, prompt in enumerate(prompts):
            engine.engine.add_request(
                f"r{number}",
                {"prompt_token_ids": prompt},
                engine.sampling(4),
                session_id=f"s{number}" if number < 2 else None,
                kv_hints=KvHintsEnvelope("1", "m", actions) if number else None,
            )
            next(done for done in itertools.count() if engine.step())
        engine.settle()
        assert engine.snapshot().requests.kv_hints == {"pin": 2, "other": 2}
        with httpx.Client(base_url=engine.connector._the_core().admin_url, timeout=DEADLINE_S) as admin:
            metrics = admin.get("/metrics").text
            assert 'kvferry_kv_hints_total{action="pin"} 2.0' in metrics
            dropped = admin.post("/admin/v1/reset", json={"match": {"session": "s1"}}).json()
            assert dropped["dropped_blocks"] == 4
            held = {one["session"] for one in admin.get("/admin/v1/blocks").json()["items"]}
    assert held == {"s0", None}
