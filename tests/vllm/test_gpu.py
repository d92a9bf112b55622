"""kvferry in vLLM on a GPU, with vLLM's compiled kernels and CUDA graphs: the same answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engines import DEVICE_BLOCKS, InProcess, in_process, transfer_config
from tests.vllm.workload import Answer, assert_same, shared_prefixes
from vllm.envs import disable_envs_cache

ON_CPU = bool(os.environ.get("TEST_GPU_ON_CPU"))
"""Whether these tests themselves are tried, on the CPU backend: without graphs, with its one layout."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="needs a CUDA device"),
]
PROMPTS = shared_prefixes(200)
GRAPHS: dict[str, Any] = {"enforce_eager": ON_CPU}
LAYOUTS = ["LBHNC"] if ON_CPU else ["LBNHC", "BLNHC"]
BFLOAT16_GAP = 0.1
"""Logits of 4 to 8 are multiples of 1/32 in bfloat16, so that near ties are much further apart than in float32."""
BFLOAT16_SHARE = 0.1


@pytest.fixture(scope="module")
def alone(llama: Path, request: pytest.FixtureRequest) -> list[Answer]:
    """Answers of vLLM alone in a precision, one prompt at a time, most of which differ."""
    with in_process(llama, num_gpu_blocks_override=4096, dtype=request.param, **GRAPHS) as engine:
        answers = [answer for prompt in PROMPTS for answer in engine.generate([prompt])]
    assert len({answer.token_ids for answer in answers}) > len(answers) // 2
    return answers


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A layout of vLLM's KV cache, which vLLM takes from an environment variable that it reads once."""
    disable_envs_cache()
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", request.param)
    yield request.param
    disable_envs_cache()


def ask_twice(engine: InProcess) -> list[Answer]:
    """Ask with a device cache that is overwritten meanwhile."""
    answers = [answer for _ in range(2) for answer in engine.generate(PROMPTS)]
    after = engine.settle()
    assert after.load.blocks > 2 * DEVICE_BLOCKS
    assert (after.store.failed, after.load.failed) == (0, 0)
    assert engine.scheduler.device.num_held == 0
    return answers


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("alone", ["float32"], indirect=True)
def test_answers_with_cuda_graphs_are_those_of_vllm_alone(
    mode: str, layout: str, llama: Path, alone: list[Answer]
) -> None:
    with in_process(llama, transfer_config(store_mode=mode, load_decision="always"), **GRAPHS) as engine:
        assert str(engine.vllm_scheduler.kv_cache_config.kv_cache_layout) == layout
        assert_same(ask_twice(engine), 2 * alone)


@pytest.mark.parametrize("layout", LAYOUTS, indirect=True)
@pytest.mark.parametrize("alone", ["bfloat16"], indirect=True)
@pytest.mark.usefixtures("layout")
def test_answers_of_flash_attention_are_those_of_vllm_alone(llama: Path, alone: list[Answer]) -> None:
    transfer = transfer_config(load_decision="always")
    with in_process(llama, transfer, dtype="bfloat16", **GRAPHS) as engine:
        assert_same(ask_twice(engine), 2 * alone, BFLOAT16_GAP, BFLOAT16_SHARE)


@pytest.mark.skipif(ON_CPU, reason="the CPU backend has no sleep mode")
@pytest.mark.parametrize("alone", ["float32"], indirect=True)
def test_answers_after_sleep_come_from_the_pool(llama: Path, alone: list[Answer]) -> None:
    """vLLM frees the KV cache's memory, and maps other memory at its addresses."""
    transfer = transfer_config(load_decision="always")
    with in_process(llama, transfer, enable_sleep_mode=True, **GRAPHS) as engine:
        for _ in range(2):
            assert_same(engine.generate(PROMPTS[:20]), alone[:20])
            before = engine.settle().load.blocks
            engine.llm.sleep(level=1)
            engine.llm.wake_up()
            assert_same(engine.generate(PROMPTS[:20]), alone[:20])
            assert engine.settle().load.blocks > before
        assert_same(ask_twice(engine), 2 * alone)
