"""Opening and closing of the tiers of the setting TIERS. Each is opened within its `timeout_s`, or start is refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

import numpy as np
from numpy.typing import NDArray

from kvferry.app.settings.tiers import TierSettings, load_type
from kvferry.app.tiers.block_store import SlotBytes, TierContext, TierRefused
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.tiers.base import Tier
from kvferry.cuda_ops.pool.host_pool import HostPool

_log = logging.getLogger(__name__)

CLOSE_S = 5.0


def open_tiers(
    entries: Sequence[TierSettings],
    fingerprint: Mapping[str, object],
    slot_bytes: int,
    slots: SlotBytes,
    on_finished: Callable[[], None],
    *,
    engine: str,
) -> dict[str, ThreadedTier]:
    """Return the tiers by name, in the order of the setting. Raises `TierRefused` after closing those opened before."""
    if entries and fingerprint.get("revision", "none needed") is None:
        raise TierRefused(
            "KVFERRY_TIERS: the revision of the model is unknown, so a tier could return blocks of another revision; "
            "leave KVFERRY_TIERS out, or set the model to a local folder"
        )
    tiers: dict[str, ThreadedTier] = {}
    try:
        for entry in entries:
            context = TierContext(entry.name, fingerprint, slot_bytes, engine)
            tiers[entry.name] = _open_within(entry, context, slots, on_finished)
    except BaseException:
        for tier in tiers.values():
            tier.close(CLOSE_S)
        raise
    return tiers


def check_tiers(entries: Sequence[TierSettings], slot_bytes: int | None) -> None:
    """Raise `TierRefused` for a tier that could not be opened, if its type has a `check` for that.

    `slot_bytes` is None where the model is not known yet.
    """
    for entry in entries:
        check = getattr(load_type(entry.type), "check", None)
        if check is not None:
            check(entry, slot_bytes)


def tier_notices(entries: Sequence[TierSettings]) -> list[str]:
    """Return what an operator should know of tiers that can be opened, if their types have `notices` for that."""
    of_types = [(entry, getattr(load_type(entry.type), "notices", None)) for entry in entries]
    return [text for entry, notices in of_types if notices is not None for text in notices(entry)]


def close_tiers(tiers: Mapping[str, Tier]) -> None:
    """Close every tier, also after one that raises."""
    for name, tier in tiers.items():
        try:
            tier.close(CLOSE_S)
        except Exception:  # noqa: BLE001 - the other tiers are closed all the same
            _log.exception("tier %s: close raised", name)


def _open_within(
    entry: TierSettings, context: TierContext, slots: SlotBytes, on_finished: Callable[[], None]
) -> ThreadedTier:
    """Open one tier on a thread of its own, which is abandoned when it takes longer than `timeout_s`."""
    kind = load_type(entry.type)
    opened: Future[ThreadedTier] = Future()

    def run() -> None:
        try:
            tier = ThreadedTier(kind.open(entry, context), entry, context, slots, on_finished)
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
            if opened.set_running_or_notify_cancel():
                opened.set_exception(error)
            return
        if opened.set_running_or_notify_cancel():
            opened.set_result(tier)
        else:
            tier.close(CLOSE_S)

    threading.Thread(target=run, name=f"kvferry-open-{entry.name}", daemon=True).start()
    try:
        done, _ = wait([opened], entry.timeout_s)
        if not done and opened.cancel():
            raise TierRefused(
                f"KVFERRY_TIERS: tier {entry.name} did not open within timeout_s={entry.timeout_s:g} s: see whether "
                "its disk or server answers, or give it more time"
            )
        return opened.result(CLOSE_S)
    except TierRefused:
        raise
    except Exception as error:
        raise TierRefused(
            f"KVFERRY_TIERS: tier {entry.name} cannot be opened: {type(error).__name__}: {error}; see its documentation"
        ) from error


class PoolSlots:
    """The host pool as a `SlotBytes`. A block has a part of equal size on each rank, in their order."""

    def __init__(self, pool: HostPool, before_access: Callable[[int], None] | None = None) -> None:
        """`before_access` is called with each slot before its bytes are returned, on the tier's thread."""
        self._pool = pool
        self._before_access = before_access

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """See `SlotBytes`. Raises `ValueError` for a length that is no block's."""
        part_bytes, rest = divmod(num_bytes, self._pool.num_ranks)
        if rest or not 0 <= part_bytes <= self._pool.slot_bytes:
            raise ValueError(
                f"{num_bytes} bytes are no block of {self._pool.num_ranks} ranks with slots of {self._pool.slot_bytes}"
            )
        if self._before_access is not None:
            self._before_access(slot)
        return [part[:part_bytes] for part in self._pool.row(slot)]
