"""What a tier is given when it is opened, and how it says that it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core.tiers import SlotBytes


class TierRefused(ValueError):
    """A tier that cannot be used as it was asked for. The message names the tier, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """The process as a tier sees it.

    `fingerprint` is whatever changes what bytes mean: blocks that were stored under another one must never be found.
    No block is longer than `slot_bytes`. `on_finished` may be called from any thread once `poll` has something new that
    a request waits for; it only notifies. `engine` names the engine; those that share one configuration, as
    data-parallel ones do, have names of their own.
    """

    name: str
    fingerprint: Mapping[str, object]
    slot_bytes: int
    slots: SlotBytes
    on_finished: Callable[[], None]
    engine: str = "kvferry"
