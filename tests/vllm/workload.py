"""Prompts that share prefixes, and how answers are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.vllm.excuses import EXCUSES
from tests.vllm.models import VOCABULARY

BLOCK = 32
EXCUSED_GAP = 1e-3
"""Where the baseline's two best tokens are so close, rounding may choose either."""
EXCUSED_SHARE = 0.01

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and at each place by how much the best beat the second best (log-probabilities)."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    num_cached: int


def random_tokens(rng: random.Random, count: int) -> Prompt:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def shared_prefixes(count: int, prefixes: int = 14, prefix_tokens: int = 8 * BLOCK, seed: int = 3) -> list[Prompt]:
    """`count` prompts, each one of `prefixes` long beginnings and an end of its own."""
    rng = random.Random(seed)
    beginnings = [random_tokens(rng, prefix_tokens) for _ in range(prefixes)]
    return [rng.choice(beginnings) + random_tokens(rng, rng.randrange(4, 80)) for _ in range(count)]


def shared_heads(heads: int, prompts_each: int, head_tokens: int, tail_tokens: int, seed: int) -> list[Prompt]:
    """Prompts with tails of their own, in rounds over the heads: the first of each head, then the second, and so on."""
    rng = random.Random(seed)
    beginnings = [random_tokens(rng, head_tokens) for _ in range(heads)]
    return [head + random_tokens(rng, tail_tokens) for _ in range(prompts_each) for head in beginnings]


def assert_same(
    answers: Sequence[Answer], truth: Sequence[Answer], gap: float = EXCUSED_GAP, share: float = EXCUSED_SHARE
) -> None:
    """Answers equal the baseline's; a near tie may fall either way, and is printed at the end of the run."""
    assert len(answers) == len(truth)
    excused = 0
    for number, (got, wanted) in enumerate(zip(answers, truth, strict=True)):
        if got.token_ids == wanted.token_ids:
            continue
        at = next(i for i, pair in enumerate(zip(got.token_ids, wanted.token_ids, strict=True)) if pair[0] != pair[1])
        assert wanted.gaps[at] <= gap, (
            f"answer {number} differs at token {at}: {got.token_ids} instead of {wanted.token_ids}, and the baseline "
            f"was sure of it by {wanted.gaps[at]}"
        )
        EXCUSES.append(f"answer {number} of {len(truth)} differs at token {at}, a near tie: {wanted.gaps[at]}")
        excused += 1
    assert excused <= share * len(truth), f"{excused} near ties are too many"


def count_different(answers: Sequence[Answer], truth: Sequence[Answer]) -> int:
    return sum(got.token_ids != wanted.token_ids for got, wanted in zip(answers, truth, strict=True))
