"""What a toy engine's steps compute: a chunk of tokens reads the blocks its layers look at, and fills others.

The rule of each kind of group is written out here once more, apart from core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.groups import Group, GroupKind
from tests.harness.toy_device import ToyDevice
from tests.harness.toy_tokens import ToyRequest, value_at


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a request, with the tables they are computed in; `life` tells if it lost them since.

    `num_drafts` tokens are guessed behind them, and may be taken back. One that `samples` is followed by a decision:
    the request is over, or one more token is chosen, which `expects` says.
    """

    request: ToyRequest
    life: int
    start: int
    end: int
    num_drafts: int
    samples: bool
    expects: bool
    tables: tuple[list[int], ...]

    def blocks_from(self, groups: Sequence[Group], num_tokens: int) -> list[int]:
        """The blocks that it writes to from token `num_tokens` on."""
        last = self.end + self.num_drafts
        size = [group.spec.block_size for group in groups]
        return [b for g, table in enumerate(self.tables) for b in table[num_tokens // size[g] : -(-last // size[g])]]


def first_needed(group: Group, num_tokens: int) -> int:
    """The first block of a group that the token behind the first `num_tokens` looks at."""
    spec = group.spec
    if spec.kind is GroupKind.FULL:
        return 0
    if spec.kind is GroupKind.SLIDING:
        return max(num_tokens - spec.window_tokens + 1, 0) // spec.block_size
    return max(num_tokens - 1, 0) // spec.block_size


def needed_values(
    group: Group, table: Sequence[int], chain: Sequence[int], num_tokens: int, first_token: int = 0
) -> list[tuple[int, int]]:
    """What one goes on from behind `num_tokens` tokens, from `first_token` on: blocks and the values they must have."""
    size = group.spec.block_size
    first, end = max(first_needed(group, num_tokens), first_token // size), -(-num_tokens // size)
    return [(table[i], value_at(chain[min((i + 1) * size, num_tokens)], group.index)) for i in range(first, end)]


def check_context(device: ToyDevice, groups: Sequence[Group], chunk: Chunk) -> None:
    """Nothing is computed from anything but the right bytes."""
    for group in groups:
        needed = needed_values(group, chunk.tables[group.index], chunk.request.chain, chunk.start)
        check_values(device, needed, f"{chunk.request.request_id} computes token {chunk.start} of group {group.index}")


def check_values(device: ToyDevice, needed: Sequence[tuple[int, int]], what: str) -> None:
    """Blocks have the values that they must have, on any rank."""
    for rank, values in enumerate(device.values):
        for block_id, value in needed:
            assert values[block_id] == value, f"{what} from wrong bytes in block {block_id}, rank {rank}"


def fill(device: ToyDevice, groups: Sequence[Group], chunk: Chunk, end: int, every_state: bool) -> None:
    """Give the chunk's blocks the values of tokens up to `end`, and let the full ones be found."""
    request, start = chunk.request, chunk.start
    for group in groups:
        size, table = group.spec.block_size, chunk.tables[group.index]
        first = start // size
        if group.spec.kind is GroupKind.RECURRENT and not every_state:
            first = (end - 1) // size
        for i in range(first, -(-end // size)):
            block_id, block_end = table[i], min((i + 1) * size, end)
            if block_id == device.null_block:
                continue
            value = value_at(request.chain[block_end], group.index)
            for values in device.values:
                values[block_id] = value
            if block_end == (i + 1) * size:
                device.cache(group.index, request.hash_at(block_end), block_id)
