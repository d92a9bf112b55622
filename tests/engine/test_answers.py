"""Whatever the batching, the cache and the preemptions: greedy answers are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvferry.app.engines.embedded.block_pool import hash_prompt
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.request import ClientOptions, SamplingParams
from tests.harness.embedded import ask, ask_all, greedy, random_prompts, reference_answer, reference_model, run

MODELS = ("tiny", "llama", "qwen2", "qwen3", "mistral")
MAX_TOKENS = 6
BATCHING = {
    "whole": {"device_blocks": 200},
    "chunks": {"device_blocks": 200, "max_batched_tokens": 7, "max_running": 3},
    "token-by-token": {"device_blocks": 200, "max_batched_tokens": 1, "max_running": 4, "block_size": 5},
    "small-pool": {"device_blocks": 40, "block_size": 4, "max_batched_tokens": 64},
}
Make = Callable[..., EmbeddedEngine]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, str]) -> Callable[[str], tuple[list[list[int]], list[list[int]]]]:
    """Prompts and reference answers, computed once a model. Some prompts begin alike."""
    known: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    def of(model: str) -> tuple[list[list[int]], list[list[int]]]:
        if model not in known:
            prompts = random_prompts(11, 10, 90)
            prompts += [prompts[0] + tail for tail in random_prompts(12, 4, 30)]
            module = reference_model(checkpoints[model])
            known[model] = prompts, [reference_answer(module, prompt, MAX_TOKENS) for prompt in prompts]
        return known[model]

    return of


def _is_quick(model: str, batching: str) -> bool:
    """Batching is the same code for every model; mistral has a sliding window besides. One token a step is slow."""
    if batching == "whole" or model == "tiny":
        return batching != "token-by-token"
    return (model, batching) in {("qwen3", "token-by-token"), ("mistral", "chunks")}


@pytest.mark.parametrize(
    ("model", "batching"),
    [
        pytest.param(model, batching, marks=[] if _is_quick(model, batching) else [pytest.mark.long])
        for model in MODELS
        for batching in BATCHING
    ],
)
def test_answers_are_the_models_own(
    model: str, batching: str, checkpoints: dict[str, str], expected: Callable, make_engine: Make
) -> None:
    prompts, answers = expected(model)
    engine = make_engine(model=checkpoints[model], **BATCHING[batching])
    engine.start()
    assert [answer.token_ids for answer in ask_all(engine, prompts, greedy(MAX_TOKENS))] == answers
    again = ask_all(engine, prompts, greedy(MAX_TOKENS))
    assert [answer.token_ids for answer in again] == answers
    assert engine.last_error is None


def test_the_cache_of_one_tenant_is_not_anothers(make_engine: Make) -> None:
    engine = make_engine()
    engine.start()
    prompt = random_prompts(4, 1, 1)[0] * 40

    async def cached(salt: str | None) -> int:
        return (await ask(engine, prompt, greedy(1), options=ClientOptions(salt))).cached

    assert [run(cached(salt)) for salt in (None, "a", "b", "a", "", None)] == [0, 0, 0, 32, 0, 32]


@pytest.mark.parametrize("model", ["tiny", "qwen3"])
def test_float64_is_float64_throughout(model: str, checkpoints: dict[str, str], make_engine: Make) -> None:
    engine = make_engine(model=checkpoints[model])
    assert engine.cache.tensor.dtype == torch.float64
    assert {weight.dtype for weight in engine.model.module.parameters()} == {torch.float64}
    seen = set()
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
        for layer in engine.model.module.model.layers
    ]
    engine.start()
    ask_all(engine, [[5, 6, 7]], greedy(2))
    assert seen == {torch.float64}
    assert len(handles) == engine.cache.shape.num_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_precisions_serve_too(dtype: str, make_engine: Make) -> None:
    engine = make_engine(dtype=dtype)
    engine.start()
    answers = ask_all(engine, random_prompts(5, 4, 40), greedy(5))
    assert [len(answer.token_ids) for answer in answers] == [5] * 4
    assert engine.block_bytes <= 256 * 1024


@pytest.mark.long
def test_one_wrong_block_changes_the_answer(make_engine: Make) -> None:
    """What `tiny` is for: whoever serves wrong KV is found out."""
    engine = make_engine(dtype="float32", device_blocks=1200)
    engine.start()
    prompts = [prompt * 2 for prompt in random_prompts(6, 65, 60) if len(prompt) > 16]
    assert len(prompts) >= 40
    before = [ask_all(engine, [prompt], greedy(16))[0].token_ids for prompt in prompts]
    assert len({tuple(answer) for answer in before}) == len(prompts)
    changed = 0
    for index, (prompt, answer) in enumerate(zip(prompts, before, strict=True)):
        block = engine.block_pool.find_prefix(_hashes(prompt))[index % ((len(prompt) - 1) // 16)]
        kept = engine.cache.blocks[block].clone()
        engine.cache.blocks[block] = engine.cache.blocks[(block + 7) % 300]
        changed += ask_all(engine, [prompt], greedy(16))[0].token_ids != answer
        engine.cache.blocks[block] = kept
    assert changed >= 0.9 * len(prompts)
    after = [ask_all(engine, [prompt], greedy(16))[0].token_ids for prompt in prompts]
    assert after == before


def _hashes(prompt: list[int]) -> list[bytes]:
    return hash_prompt(16, prompt, None, None)[: (len(prompt) - 1) // 16]


def test_sampling_is_repeatable_by_seed_whatever_runs_beside_it(make_engine: Make) -> None:
    engine = make_engine(dtype="float64")
    engine.start()
    prompt = [9, 8, 7, 6]
    alone = ask_all(engine, [prompt], SamplingParams(max_tokens=12, seed=5, ignore_eos=True))[0].token_ids
    crowd = ask_all(
        engine, [prompt] * 3 + random_prompts(8, 4, 30), SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    )
    assert [answer.token_ids for answer in crowd[:3]] == [alone] * 3
    other = ask_all(engine, [prompt], SamplingParams(max_tokens=12, seed=6, ignore_eos=True))[0].token_ids
    unseeded = [
        ask_all(engine, [prompt], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids for _ in range(2)
    ]
    assert len({tuple(alone), tuple(other), *map(tuple, unseeded)}) == 4


@pytest.mark.parametrize("limit", [{"top_p": 1e-6}, {"top_p": 1e-46}, {"temperature": 1e-6}, {"temperature": 1e-300}])
def test_sampling_when_a_limit_is_tiny_is_greedy(limit: dict[str, float], make_engine: Make) -> None:
    engine = make_engine(dtype="float32")
    engine.start()
    prompts = random_prompts(9, 4, 20)
    likeliest = [answer.token_ids for answer in ask_all(engine, prompts, greedy(8))]
    sampled = ask_all(engine, prompts, SamplingParams(max_tokens=8, ignore_eos=True, **limit))  # type: ignore[arg-type]
    assert [answer.token_ids for answer in sampled] == likeliest
