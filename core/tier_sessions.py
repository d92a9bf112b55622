"""Sessions: a request as tiers know it, from its announcement until nothing more can be submitted for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.core.tier_links import TierLink


class TierSession:
    """Held by the request while it lives, by each of its stores under way, and in lazy mode by each block kept for it.

    Whoever lets go last ends it. `wishers` are the tiers that asked for every block of the request; only they are
    remembered.
    """

    __slots__ = ("_announced", "_holds", "_on_end", "ended", "request_id", "wishers")

    def __init__(
        self,
        request_id: str,
        announced: Sequence[TierLink],
        wishers: Sequence[TierLink],
        on_end: Callable[[TierSession], None],
    ) -> None:
        """`announced` are the tiers that know of the request, and will hear of its end."""
        self.request_id = request_id
        self.wishers = tuple(wishers)
        self.ended = False
        self._announced = tuple(announced)
        self._holds = 1
        self._on_end = on_end

    def knows(self, link: TierLink) -> bool:
        """Whether a tier may be given jobs of this request."""
        return not self.ended and link in self._announced

    def hold(self) -> None:
        """Something may still be submitted for whoever holds it."""
        self._holds += 1

    def let_go(self) -> None:
        """Undo one `hold`, or that of the living request."""
        self._holds -= 1
        if not self._holds:
            self.end()

    def end(self) -> None:
        """Tell the tiers, once. Whoever still holds it submits nothing any more."""
        if not self.ended:
            self.ended = True
            for link in self._announced:
                link.finish(self.request_id)
            self._on_end(self)
