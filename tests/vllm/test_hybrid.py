"""Sliding windows beside full attention: three groups, whose blocks lie over each other in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.transfers import Direction, TransferJob
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.models import WINDOW, write_gemma
from tests.vllm.test_in_process import assert_nothing_left
from tests.vllm.test_trouble import copying  # noqa: F401 - a fixture
from tests.vllm.workload import BLOCK, Answer, assert_same, shared_heads, shared_prefixes

BLOCKS = 200
PROMPTS = shared_prefixes(80, prefixes=10, prefix_tokens=14 * BLOCK, seed=21)


@pytest.fixture(scope="module")
def truth(gemma: Path) -> list[Answer]:
    with in_process(gemma, num_gpu_blocks_override=BLOCKS) as engine:
        return engine.generate(PROMPTS)


@pytest.fixture(params=["eager", "lazy"])
def engine(gemma: Path, request: pytest.FixtureRequest) -> Iterator[InProcess]:
    transfer = transfer_config(load_decision="always", store_mode=request.param)
    with in_process(gemma, transfer, num_gpu_blocks_override=BLOCKS) as engine:
        yield engine
        assert_nothing_left(engine, BLOCKS)


def test_answers_of_hybrid_model_from_the_pool_are_the_same(engine: InProcess, truth: list[Answer]) -> None:
    assert len(engine.core.layout) == 3
    for _ in range(2):
        assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    assert after.prompt_tokens.host_hit > 0
    assert after.load.failed == 0
    assert engine.metric("vllm:external_prefix_cache_hits") > 0


def test_load_of_a_window_contains_only_its_blocks(gemma: Path) -> None:
    with in_process(gemma, transfer_config(load_decision="always"), num_gpu_blocks_override=BLOCKS) as engine:
        engine.generate(PROMPTS[:1])
        engine.forget_device()
        engine.generate(PROMPTS[:1])
        after = engine.settle()
        loaded = after.prompt_tokens.host_hit // BLOCK
        assert loaded >= 14
        assert after.load.blocks == loaded + 2 * (WINDOW // BLOCK)


@pytest.mark.parametrize("layers", ["SFSF", "SSSS"])
def test_shared_prefix_when_off_the_device_is_hit_from_third_request(tmp_path: Path, layers: str) -> None:
    """vLLM alone finds as much of the first model with a device cache that holds everything, and 0 of the second."""
    heads, head_tokens = 4, 400
    transfer = transfer_config(load_decision="always")
    model = write_gemma(tmp_path / "model", window=128, layers=layers)
    with in_process(model, transfer, num_gpu_blocks_override=60, max_model_len=800) as engine:
        prompts = shared_heads(heads, 4, head_tokens, tail_tokens=250, seed=22)
        answers = engine.generate(prompts)
        found = [sum(answer.num_cached for answer in answers[at : at + heads]) for at in range(0, 16, heads)]
        assert found[2:] == [heads * (head_tokens // BLOCK * BLOCK)] * 2
        after = engine.settle().store
        # 12 blocks of each head and 8 of each tail, and the windows before the ends of both.
        full = (heads * 12 + 16 * 8) * ("F" in layers)
        assert after.stored == full + (heads + 16) * (128 // BLOCK)
        # vLLM learns of a boundary that its device knows nothing of.
        engine.forget_device()
        engine.add("branch", prompts[0][:200] + prompts[1][:100])
        engine.step()
        (branch,) = engine.vllm_scheduler.requests.values()
        assert branch.shared_prefix_boundary == 200 // BLOCK * BLOCK
        while engine.vllm_scheduler.requests:
            engine.step()


@pytest.mark.parametrize("every", [1, 2])
def test_load_of_several_groups_when_failed_fails_its_request(
    gemma: Path,
    truth: list[Answer],
    copying: Any,  # noqa: F811
    every: int,
) -> None:
    """Blocks go by the same numbers in several groups: vLLM's engine ends on a report of block ids."""
    with in_process(gemma, transfer_config(load_decision="always"), num_gpu_blocks_override=BLOCKS) as engine:
        engine.generate(PROMPTS)
        engine.forget_device()
        loads: list[int] = []

        def fail(job: TransferJob) -> None:
            if job.direction is Direction.LOAD:
                loads.append(job.job_id)
                if len(loads) % every == 0:
                    raise OSError("injected")

        copying(fail)
        assert_same(engine.generate(PROMPTS), truth)
        after = engine.settle()
        assert after.load.failed > 0
        assert_nothing_left(engine, BLOCKS)
