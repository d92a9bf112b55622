"""Random models, settings and workloads for `bench.vllm_oracle`, each determined by its seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.vllm.models import MAX_TOKENS, VOCABULARY, _seeded, _write, write_gemma, write_llama
from tests.vllm.workload import Prompt, random_tokens

ANSWER_TOKENS = (1, 48)
_PROMPT_SHARE = 0.6
"""No prompt takes more than this share of the device's blocks."""
_LAYER_TOKEN_BYTES = 1024
"""Bytes that a token takes in one layer of the models below."""


@dataclass(frozen=True, slots=True)
class ModelKind:
    """KV-cache groups of a model, each with the same number of layers.

    Models with MLA are missing: on the CPU backend vLLM switches prefix caching off for them.
    """

    name: str
    groups: int = 1
    layers_per_group: int = 4


MODELS = {
    kind.name: kind
    for kind in (
        ModelKind("llama"),
        ModelKind("gemma", groups=3, layers_per_group=2),
        ModelKind("gptoss", groups=2, layers_per_group=2),
        ModelKind("sliding", layers_per_group=4),
    )
}


def write_model(name: str, folder: Path) -> Path:
    """Write the tiny model of this kind."""
    if name == "llama":
        return write_llama(folder)
    if name == "gemma":
        return write_gemma(folder)
    pattern = {"gptoss": ["sliding_attention", "full_attention"], "sliding": ["sliding_attention"] * 2}[name]
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=128,
        layer_types=pattern * 2,
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,
    )
    return _write(Gemma3ForCausalLM(_seeded(config)), folder)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: `tokens`, after the prompt and answer of the request `follows`, if given.

    It is aborted after `abort_after` steps in the engine; None: never.
    """

    name: str
    tokens: tuple[int, ...]
    max_tokens: int
    follows: str | None = None
    abort_after: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A workload with its engine settings, for `ranks` tensor-parallel ranks.

    At most `concurrency` requests are in the engine at once.
    """

    seed: int
    model: str
    block_size: int
    device_blocks: int
    pool_slots: int
    blocks_per_slot: int
    step_tokens: int
    prompt_only: bool
    load_always: bool
    concurrency: int
    turns: tuple[Turn, ...]
    ranks: int = 1

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the pool; a slot holds `blocks_per_slot` blocks of one group."""
        kind = MODELS[self.model]
        slot_tokens = self.block_size * self.blocks_per_slot
        return self.pool_slots * slot_tokens * kind.layers_per_group * _LAYER_TOKEN_BYTES

    @property
    def engine_options(self) -> dict[str, Any]:
        """Return vLLM's options."""
        # For a window vLLM counts a block more than its tokens need.
        longest_blocks = (self.device_blocks - 1) // MODELS[self.model].groups - 1
        return {
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.device_blocks,
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": 8,
            "tensor_parallel_size": self.ranks,
            "max_model_len": min(longest_blocks * self.block_size, 2048),
        }

    @property
    def extra_config(self) -> dict[str, object]:
        """Return kvferry's options except the store mode."""
        return {
            "pool_bytes": self.pool_bytes,
            "blocks_per_slot": self.blocks_per_slot,
            "offload_prompt_only": self.prompt_only,
            "load_decision": "always" if self.load_always else "auto",
        }


def draw_case(seed: int, models: Sequence[str], num_turns: int | None = None) -> Case:
    """Return the case of a seed: models in turn, everything else at random."""
    rng = random.Random(f"case {seed}")
    model = models[seed % len(models)]
    kind = MODELS[model]
    block_size = rng.choice((32, 32, 32, 64))
    device_blocks = rng.randint(40, 250) * (1 if kind.groups == 1 else 2)
    blocks_per_slot = rng.choice((1, 1, 2, 4))
    longest = min(int(_PROMPT_SHARE * device_blocks / kind.groups) * block_size, 1500)
    turns = _draw_turns(rng, longest, num_turns or rng.randint(40, 110))
    num_blocks = kind.groups * sum(len(turn.tokens) for turn in turns) // block_size
    return Case(
        seed=seed,
        model=model,
        block_size=block_size,
        device_blocks=device_blocks,
        pool_slots=max(int(rng.choice((0.1, 0.3, 1, 4)) * num_blocks / blocks_per_slot), 16),
        blocks_per_slot=blocks_per_slot,
        step_tokens=rng.choice((128, 256, 512, 1024)),
        prompt_only=rng.random() < 0.6,
        load_always=rng.random() < 0.7,
        concurrency=rng.choice((1, 4, 8, 16)),
        turns=turns,
    )


def _draw_turns(rng: random.Random, longest: int, count: int) -> tuple[Turn, ...]:
    """Return a mix of shared heads, branching trees, conversations, repetitions and unrelated prompts."""
    heads = [random_tokens(rng, rng.randint(1, max(longest // 2, 2))) for _ in range(rng.randint(1, 6))]
    aborts = rng.choice((0.0, 0.0, 0.15, 0.4))
    turns: list[Turn] = []
    prompts: list[Prompt] = []
    open_turns: list[tuple[Turn, int]] = []
    for number in range(count):
        shape = rng.choice(("head", "head", "branch", "talk", "talk", "repeat", "unique"))
        follows = None
        spent = 0
        if shape == "talk" and open_turns and rng.random() < 0.8:
            before, spent = open_turns.pop(rng.randrange(len(open_turns)))
            follows = before.name
            tokens = random_tokens(rng, rng.randint(1, 60))
        elif shape == "branch" and prompts:
            trunk = rng.choice(prompts)
            tokens = trunk[: rng.randint(1, len(trunk))] + random_tokens(rng, rng.randint(1, longest // 3 + 1))
        elif shape == "repeat" and prompts:
            tokens = rng.choice(prompts)
        elif shape == "head":
            tokens = rng.choice(heads) + random_tokens(rng, rng.randint(1, longest // 3 + 1))
        else:
            tokens = random_tokens(rng, rng.randint(1, longest))
        tokens = tokens[: longest - spent]
        max_tokens = rng.randint(*ANSWER_TOKENS)
        abort_after = rng.randint(1, 12) if rng.random() < aborts else None
        turn = Turn(f"r{number}", tuple(tokens), max_tokens, follows, abort_after)
        turns.append(turn)
        spent += len(tokens) + max_tokens
        if follows is None:
            prompts.append(tokens)
        if abort_after is None and longest - spent > 64:
            open_turns.append((turn, spent))
    return tuple(turns)
