"""A look: what one request has asked of the tiers, and how far their answers have come."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvferry.core.keys import Key
from kvferry.core.tier_links import TierLink


class LookPhase(Enum):
    """How far a request has come with the tiers."""

    LOOKING = "looking"
    PROMOTING = "promoting"
    DONE = "done"


@dataclass(slots=True, eq=False)
class TierLook:
    """What one request waits for from the tiers, until `until_s`. `answers` are the keys that each tier has.

    `waits_for` counts the look-ups, or the promotions, that it waits for. What a tier said means nothing once any reset
    has come over it, as `version` tells, and nothing at all counts in another `epoch` of the pool. `limit_token` is
    where the keys that were asked for end. `num_lost` blocks did not come.
    """

    version: int
    epoch: int
    until_s: float
    limit_token: int
    phase: LookPhase = LookPhase.LOOKING
    waits_for: Counter[TierLink] = field(default_factory=Counter)
    num_lost: int = 0
    answers: dict[str, set[Key]] = field(default_factory=dict)
