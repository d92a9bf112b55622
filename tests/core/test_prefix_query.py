"""Queries of prompts: what device, pool and tiers hold, against the rule written out block by block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import Key, RequestIdentity, make_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.prefix_query import PrefixHeld, PrefixQuery
from kvferry.core.tiers.base import TierResult
from kvferry.core.tiers.client import TierClient
from tests.core.test_hits import SPECS, blocks_needed

MAX_TOKENS = 90


class KeyTier:
    """A tier that holds keys, and answers look-ups at the next poll."""

    timeout_s = 10.0

    def __init__(self, held: set[Key]) -> None:
        self.held = held
        self.num_looked_up = 0
        self._results: list[TierResult] = []

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        self.num_looked_up += len(keys)
        self._results.append(TierResult(number, np.array([key in self.held for key in keys], dtype=np.bool_)))

    def cancel(self, number: int) -> None:
        self._results = [result for result in self._results if result.number != number]

    def poll(self) -> list[TierResult]:
        results, self._results = self._results, []
        return results


def keys_of(layout: GroupLayout, hashes: Sequence[bytes]) -> list[list[Key]]:
    return [make_keys(hashes[g.hashes_per_slot - 1 :: g.hashes_per_slot], g.index) for g in layout.groups]


def make_client(tier: KeyTier) -> TierClient:
    return TierClient("disk", tier, LoadOrCompute(), count().__next__, 512)


def drive(query: PrefixQuery, client: TierClient, now_s: float = 0.0) -> PrefixHeld:
    query.ask_tiers(now_s)
    while not query.has_answers():
        client.poll(now_s)
    return query.close()


@given(
    specs=st.lists(SPECS, min_size=1, max_size=3),
    blocks_per_slot=st.sampled_from([1, 2, 3, 8]),
    num_tokens=st.integers(1, MAX_TOKENS),
    data=st.data(),
)
def test_query_finds_the_longest_prefix_of_each_place(specs, blocks_per_slot, num_tokens, data) -> None:
    layout = GroupLayout(specs, blocks_per_slot)
    blocks = GroupLayout(specs, 1)
    hashes = [b"%08d" % i for i in range(num_tokens // layout.hash_block_size)]
    slot_keys, block_keys = keys_of(layout, hashes), keys_of(blocks, hashes)

    def choose(by_group: list[list[Key]]) -> set[Key]:
        known = [key for keys in by_group for key in keys]
        return set(known) - (data.draw(st.sets(st.sampled_from(known), max_size=4)) if known else set())

    on_device, in_pool, in_tier = choose(block_keys), choose(slot_keys), choose(slot_keys)
    manager = OffloadManager(512, layout.slot_bytes)
    offer = manager.prepare_store(
        sorted(in_pool), RequestIdentity("r"), np.arange(len(in_pool), dtype=np.int64), 1, 0.0
    )
    manager.complete_store(offer.slots, 0.0)
    device = SimpleNamespace(resident=lambda keys: [key in on_device for key in keys])
    client = make_client(KeyTier(in_tier))

    def longest(*places: str) -> int:
        def is_held(group: int, block: int) -> bool:
            slot = block // layout.groups[group].slot_blocks
            key = slot_keys[group][slot] if slot < len(slot_keys[group]) else None
            return (
                ("device" in places and block < len(block_keys[group]) and block_keys[group][block] in on_device)
                or ("pool" in places and key in in_pool)
                or ("disk" in places and key in in_tier)
            )

        for end in range(num_tokens, 0, -1):
            if all(end % spec.block_size == 0 for spec in specs) and all(
                is_held(group, block) for group, spec in enumerate(specs) for block in blocks_needed(spec, 0, end)
            ):
                return end
        return 0

    held = drive(PrefixQuery(manager, layout, device, [client], hashes), client)
    assert held == PrefixHeld(
        longest("device"), longest("pool"), {"disk": longest("disk")}, longest("device", "pool", "disk")
    )


def test_query_of_a_long_prompt_asks_a_tier_until_the_first_gap() -> None:
    layout = GroupLayout([GroupSpec(4, 64)])
    hashes = [b"%08d" % i for i in range(5000)]
    (keys,) = keys_of(layout, hashes)
    tier = KeyTier(set(keys) - {keys[1500]})
    client, device = make_client(tier), SimpleNamespace(resident=lambda keys: [False] * len(keys))
    held = drive(PrefixQuery(OffloadManager(8, 64), layout, device, [client], hashes), client)
    assert held == PrefixHeld(0, 0, {"disk": 6000}, 6000)
    assert tier.num_looked_up == 2000


def test_query_when_a_tier_does_not_answer_says_so() -> None:
    layout = GroupLayout([GroupSpec(4, 64)])
    client, device = make_client(KeyTier(set())), SimpleNamespace(resident=lambda keys: [True] * len(keys))
    query = PrefixQuery(OffloadManager(8, 64), layout, device, [client], [b"a", b"b"])
    query.ask_tiers(0.0)
    assert not query.has_answers()
    assert query.close() == PrefixHeld(8, 0, {"disk": None}, 8)
    assert query.has_answers()
    # A late answer changes nothing, and asks for no more.
    client.poll(0.0)
    assert not client.open_jobs


def test_query_when_the_device_keeps_changing_counts_its_blocks_as_missing() -> None:
    def changes(keys: Sequence[Key]) -> list[bool]:
        raise RuntimeError("dictionary changed size during iteration")

    layout = GroupLayout([GroupSpec(4, 64)])
    query = PrefixQuery(OffloadManager(8, 64), layout, SimpleNamespace(resident=changes), [], [b"a"])
    assert query.close() == PrefixHeld(0, 0, {}, 0)
