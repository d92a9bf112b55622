"""Auto pause: decides when storing is paused because offloading costs more than it saves, and when to try again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WINDOW_S = 600.0
"""Length of the running balance: a conversation's next turn may come minutes after its blocks were stored."""
NOISE_S = 0.005 * WINDOW_S
"""A balance is negative if cost exceeds gain by more than this."""
MAX_PAUSE_S = 4 * 3600.0


class Storing(StrEnum):
    """Whether blocks are stored: always, not at all, or as a trial that decides between these."""

    ON = "on"
    PAUSED = "paused"
    PROBING = "probing"


@dataclass(slots=True)
class AutoPause:
    """State of the decision.

    Storing is paused once the running balance was negative for a whole window. After `pause_s` it is tried for a
    window, which is all that the running balance then covers: if that is negative, storing is paused for twice as long,
    up to `MAX_PAUSE_S`; else it is on again.

    `since_s` is when the trial or the pause began, and `negative_since_s` when the balance has become negative while
    storing is on.
    """

    state: Storing = Storing.ON
    since_s: float = 0.0
    pause_s: float = WINDOW_S
    negative_since_s: float | None = None

    def restart(self) -> None:
        """Turn storing on, and forget what was observed."""
        self.pause_s = WINDOW_S
        self._begin(Storing.ON, 0.0)

    def observe(self, net_s: float | None, now_s: float) -> bool:
        """Follow the running balance, and return whether the state has changed.

        Args:
            net_s: Gain less cost of the latest window; None while it is not measured.
            now_s: The time, by a clock that is never set back.
        """
        negative, before = net_s is not None and net_s < -NOISE_S, self.state
        if before is Storing.ON:
            if not negative:
                self.negative_since_s = None
            elif self.negative_since_s is None:
                self.negative_since_s = now_s
            elif now_s - self.negative_since_s >= WINDOW_S:
                self._begin(Storing.PAUSED, now_s)
        elif before is Storing.PAUSED:
            if now_s - self.since_s >= self.pause_s:
                self._begin(Storing.PROBING, now_s)
        elif now_s - self.since_s >= WINDOW_S:
            if negative:
                self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
                self._begin(Storing.PAUSED, now_s)
            else:
                self.restart()
        return self.state is not before

    def _begin(self, state: Storing, now_s: float) -> None:
        self.state, self.since_s, self.negative_since_s = state, now_s, None
