"""Eviction policies: of the slots that may go, which goes first.

A policy sees only slots that are ready and that nobody has pinned. Batches come in the order of their request's blocks,
and of a batch that was used at once the last slot goes first, so that prefixes die from their end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.core.arc import ArcPolicy
from kvferry.core.lru import LruPolicy
from kvferry.core.marks import Marks
from kvferry.core.segments import Segment
from kvferry.core.slots import SlotTable
from kvferry.core.transfers import Slots


class EvictionPolicy(Protocol):
    """The order in which slots go. Every method is O(1) amortized a slot."""

    name: str

    def take_over(self, full: Segment, empty: Segment) -> None:
        """Start, or start again, with the candidates that are in `full`, in the order in which others would evict them.

        From now on both segments are this policy's.
        """

    def __len__(self) -> int:
        """How many slots may be evicted."""

    def admit(self, slots: Slots) -> None:
        """These slots were just published, and may go from now on."""

    def add(self, slots: Slots) -> None:
        """These slots, which were pinned, may go again from now on. They were used."""

    def touch(self, slots: Slots) -> None:
        """These candidates were used."""

    def reorder(self, slots: Slots) -> None:
        """These candidates go in this order among themselves, after others. It is no use of them."""

    def remove(self, slots: Slots) -> None:
        """These slots, all of them candidates, are pinned or gone."""

    def make_room(self, wanted: Marks, free: Slots, spared: Slots, young: int) -> Slots:
        """Remove and return the slots that go for `wanted`, in the order in which they go; fewer if there are no more.

        The keys of these marks are not in the pool; the first of them get the `free` slots, the others those that go.
        None goes of the candidates `spared`, nor of the `young` ones that were used last in any queue.
        """

    def peek_victims(self, count: int) -> Slots:
        """Some of the `count` slots that go next, the first to go in front, of one priority class. They stay."""

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Allocate what another number of slots takes, also while the policy is not in force. Called without the lock.

        What is returned puts it in force, in O(1), and returns what is to be freed behind the lock. The table has room
        for all the slots there can be, and its queues with it.
        """

    def clear(self) -> None:
        """Forget every slot, in O(1)."""

    def hand_over(self) -> tuple[Segment, Segment]:
        """The two segments with all candidates, for the next policy; those of the first shall go first."""


EVICTION_POLICIES: dict[str, Callable[[SlotTable], EvictionPolicy]] = {
    LruPolicy.name: lambda table: LruPolicy(),
    ArcPolicy.name: ArcPolicy,
}
"""Every eviction policy by its name in the setting EVICTION_POLICY; each is made for a slot table."""
