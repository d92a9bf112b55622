"""What a toy engine's tokens stand for: chained hashes over a request's tokens, and the value that a right block has.

A block's value is a number derived from its tokens, all before them and its group, as KV is. So a block that holds
anything else than it should is seen at once, by comparing two numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.groups import Group

BLOCK_SIZE = 4
_MASK = 2**63 - 1
_VOCABULARY = 1009
_GROUP_FACTOR = 0x9E3779B97F4A7C1


def value_at(chain_hash: int, group: int) -> int:
    """The value of a group's block whose last token that was computed is the one that this hash ends with."""
    return chain_hash + group * _GROUP_FACTOR


def hash_bytes(chain_hash: int) -> bytes:
    return chain_hash.to_bytes(8, "big") * 2


@dataclass
class ToyRequest:
    """A request as its engine holds it. `chain[n]` is the hash of its first `n` tokens; `stop_after` ends it early.

    `num_computed` counts the tokens that are computed once every step that was planned has run, and `num_expected` the
    tokens that those steps will have chosen; `lives` is raised whenever the request loses its blocks. Of a session,
    `num_turns` are still to come.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()
    hash_block_size: int = BLOCK_SIZE
    stop_after: int | None = None
    priority: int | None = None
    unhashed: str | None = None
    kv_hint_types: Sequence[str] = ()
    num_turns: int = 0
    session: str | None = None
    num_arrived_tokens: int = 0
    chain: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_expected: int = 0
    num_loading: int = 0
    lives: int = 0
    state: str = "waiting"

    def __post_init__(self) -> None:
        self.num_arrived_tokens = self.num_prompt_tokens
        self.chain = [1]
        self._extend(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_hashed(self) -> int:
        """The number of its first tokens that have hashes."""
        return len(self.block_hashes) * self.hash_block_size

    def hash_at(self, num_tokens: int) -> bytes:
        """The hash of its first tokens, so many that hashes end there."""
        return self.block_hashes[num_tokens // self.hash_block_size - 1]

    def append_token(self) -> None:
        token = (self.tokens[-1] * 31 + len(self.tokens)) % _VOCABULARY
        self.tokens.append(token)
        self._extend([token])

    def continue_with(self, tokens: Iterable[int]) -> None:
        """Go on with tokens of the client, as a session does: the answer so far becomes part of the prompt."""
        self.tokens.extend(added := list(tokens))
        self._extend(added)
        self.num_prompt_tokens = len(self.tokens)

    def keep(self, num_tokens: int) -> None:
        """Drop all tokens but the first. `Truth` goes on to know those that are dropped, which others may have."""
        self.tokens, self.chain = self.tokens[:num_tokens], self.chain[: num_tokens + 1]
        del self.block_hashes[num_tokens // self.hash_block_size :]

    def is_done(self) -> bool:
        return self.num_outputs >= self.max_tokens

    def stops(self) -> bool:
        return self.stop_after is not None and self.num_outputs >= self.stop_after

    def _extend(self, tokens: Iterable[int]) -> None:
        chain = self.chain
        current = chain[-1]
        for token in tokens:
            current = hash((current, token)) & _MASK | 1
            chain.append(current)
        size = self.hash_block_size
        for end in range((len(self.block_hashes) + 1) * size, len(chain), size):
            self.block_hashes.append(hash_bytes(chain[end]))


class Truth:
    """What every slot has to hold, by key, for all requests that were ever heard of."""

    def __init__(self, groups: Sequence[Group], hash_block_size: int) -> None:
        self._groups = groups
        self._hash_block_size = hash_block_size
        self._chains: dict[bytes, tuple[list[int], int]] = {}
        self._known: dict[bytes, list[int]] = {}

    def learn(self, request: ToyRequest) -> None:
        """Note the hashes that a request has by now; its chain only grows."""
        chains, size = self._chains, self._hash_block_size
        for number in range(len(request.block_hashes), 0, -1):
            block_hash = request.block_hashes[number - 1]
            if block_hash in chains:
                break
            chains[block_hash] = (request.chain, number * size)

    def of(self, key: bytes) -> list[int]:
        """The values of a slot's blocks, from its first to its last."""
        known = self._known.get(key)
        if known is None:
            group = self._groups[key[-1]]
            chain, end = self._chains[key[:-1]]
            size = group.spec.block_size
            ends = range(end - group.slot_tokens + size, end + 1, size)
            known = self._known[key] = [value_at(chain[block_end], group.index) for block_end in ends]
        return known
