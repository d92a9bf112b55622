"""Hits over several groups: the longest length that all agree on, against the rule written out block by block."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.groups import Group, GroupKind, GroupLayout, GroupSpec
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.lookup import PrefixHit, PrefixLookup, RequestKeys

SPECS = st.builds(
    lambda kind, size, window: GroupSpec(size, 64, kind, window if kind is GroupKind.SLIDING else None),
    st.sampled_from(GroupKind),
    st.sampled_from([2, 4, 6]),
    st.integers(2, 15),
)


class Pool:
    """A manager that has chosen slots of one request. The request is hashed every `layout.hash_block_size` tokens."""

    def __init__(self, layout: GroupLayout, held: dict[int, set[int]], num_tokens: int = 200) -> None:
        self.held = held
        self.manager = OffloadManager(256, layout.slot_bytes)
        hashes = [b"%08d" % i for i in range(num_tokens // layout.hash_block_size)]
        self.keys = RequestKeys(SimpleNamespace(block_hashes=hashes, num_tokens=num_tokens), layout.groups)
        self.lookup = PrefixLookup(self.manager, layout, SimpleNamespace())
        for group in layout.groups:
            numbers = sorted(held[group.index])
            keys = [key for i in numbers for key in self.keys.of(group, i, i + 1)]
            offer = self.manager.prepare_store(keys, RequestIdentity("r"), np.array(numbers, dtype=np.int64), 1, 0.0)
            self.manager.complete_store(offer.slots, 0.0)

    def slots(self, group: Group, numbers: Iterable[int]) -> list[int]:
        keys = [key for i in numbers for key in self.keys.of(group, i, i + 1)]
        return self.manager.lookup_each(keys).tolist()

    def find(self, first_token: int, limit_token: int) -> PrefixHit:
        return self.lookup.find(self.keys, first_token, limit_token)


def blocks_needed(spec: GroupSpec, first_token: int, end_token: int) -> list[int]:
    """The blocks with a token that the first one behind `end_token` looks at, but for those the device has."""
    if spec.kind is GroupKind.RECURRENT:
        return [end_token // spec.block_size - 1]
    seen = range(end_token)
    if spec.kind is GroupKind.SLIDING:
        seen = range(max(end_token - spec.window_tokens + 1, 0), end_token)
    return sorted({token // spec.block_size for token in seen if token >= first_token})


def obvious_end(layout: GroupLayout, pool: Pool, first_token: int, limit_token: int) -> int:
    for end in range(limit_token, first_token, -1):
        if all(end % group.spec.block_size == 0 for group in layout.groups) and all(
            block // group.slot_blocks in pool.held[group.index]
            for group in layout.groups
            for block in blocks_needed(group.spec, first_token, end)
        ):
            return end
    return first_token


@given(specs=st.lists(SPECS, min_size=1, max_size=3), blocks_per_slot=st.sampled_from([1, 2, 3, 8]), data=st.data())
def test_a_hit_is_the_longest_length_that_all_groups_agree_on(specs, blocks_per_slot, data) -> None:
    layout = GroupLayout(specs, blocks_per_slot)
    num_tokens = data.draw(st.integers(1, 90))
    held = {}
    for group in layout.groups:
        whole = range(-(-num_tokens // group.slot_tokens))
        missing = data.draw(st.sets(st.sampled_from([*whole]), max_size=2))
        held[group.index] = set(whole) - missing
    pool = Pool(layout, held)
    first = data.draw(st.integers(0, num_tokens // layout.alignment_tokens)) * layout.alignment_tokens
    hit = pool.find(first, num_tokens - 1)
    assert hit.end_token == max(obvious_end(layout, pool, first, num_tokens - 1), first)
    for one in hit.groups:
        first_block, end_block = one.first_block, one.end_block
        assert list(range(first_block, end_block)) == blocks_needed(one.group.spec, first, hit.end_token)
        needed_slots = sorted({block // one.group.slot_blocks for block in range(first_block, end_block)})
        assert one.slots.tolist() == pool.slots(one.group, needed_slots)
    if not hit.num_tokens:
        return
    tables = [[10_000 * g.index + i for i in range(num_tokens)] for g in layout.groups]
    runs = hit.runs(tables, -1)
    assert runs is not None
    for run in runs:
        group = layout.groups[run.group]
        blocks = [block_id - 10_000 * run.group for block_id in run.block_ids.tolist()]
        assert blocks == blocks_needed(group.spec, first, hit.end_token)
        assert run.slots.tolist() == pool.slots(group, [block // group.slot_blocks for block in blocks])
        assert run.numbers.tolist() == [block % group.slot_blocks for block in blocks]


def test_hit_when_shortened_has_the_same_blocks_or_is_none() -> None:
    full = GroupLayout([GroupSpec(4, 64)])
    pool = Pool(full, {0: set(range(8))})
    assert pool.find(0, 32).shorten(20).groups[0].slots.tolist() == pool.slots(full.groups[0], range(5))
    window = GroupLayout([GroupSpec(4, 64), GroupSpec(4, 64, GroupKind.SLIDING, 9)])
    hit = Pool(window, {0: set(range(8)), 1: {6, 7}}).find(0, 32)
    assert hit.end_token == 32
    assert hit.shorten(28) is None


def test_runs_skip_placeholders_and_short_tables_give_none() -> None:
    layout = GroupLayout([GroupSpec(4, 64)])
    pool = Pool(layout, {0: set(range(4))})
    hit = pool.find(0, 16)
    (run,) = hit.runs([[7, 0, 8, 9]], 0) or ()
    assert (run.block_ids.tolist(), run.slots.tolist()) == ([7, 8, 9], pool.slots(layout.groups[0], [0, 2, 3]))
    assert hit.runs([[7, 8, 9]], 0) is None


@pytest.mark.parametrize(
    ("specs", "options", "said"),
    [
        ([], {}, "at least one group"),
        ([GroupSpec(0, 64)], {}, "group 0: a block has at least one token"),
        ([GroupSpec(16, 64)], {"blocks_per_slot": 0}, "blocks_per_slot=0"),
        ([GroupSpec(16, 64)], {"hash_block_size": 12}, "hash_block_size=12 does not divide"),
        ([GroupSpec(16, 64), GroupSpec(16, 64, GroupKind.SLIDING)], {}, "group 1: window_tokens=None"),
        ([GroupSpec(16, 64, GroupKind.FULL, 8)], {}, "group 0: window_tokens=8"),
    ],
)
def test_group_sizes_that_do_not_divide_are_refused(specs, options, said) -> None:
    """vllm#28950: sizes that do not divide were found at run time."""
    with pytest.raises(ValueError, match=said):
        GroupLayout(specs, **options)
