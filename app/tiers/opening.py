"""Opening the tiers that TIERS names: each is probed within its time, or the process refuses to start."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from kvferry.app.settings.tiers import TierSettings, load_type
from kvferry.core.tiers import SlotBytes, Tier, TierContext, TierRefused

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
) -> dict[str, Tier]:
    """The tiers by name, in the order of the setting. Raises `TierRefused`; what was opened before is closed then."""
    if entries and fingerprint.get("revision", "none needed") is None:
        raise TierRefused(
            "KVFERRY_TIERS: nothing says which weights the model has, so a tier could bring another revision's "
            "blocks; leave "
            "KVFERRY_TIERS out, or set the model to a local folder"
        )
    tiers: dict[str, Tier] = {}
    try:
        for entry in entries:
            context = TierContext(entry.name, fingerprint, slot_bytes, slots, on_finished, engine)
            tiers[entry.name] = _open_within(entry, context)
    except BaseException:
        for tier in tiers.values():
            tier.close(CLOSE_S)
        raise
    return tiers


def check_tiers(entries: Sequence[TierSettings]) -> None:
    """Raise `TierRefused` for a tier that could not be opened, where its type can know without opening one."""
    for entry in entries:
        check = getattr(load_type(entry.type), "check", None)
        if check is not None:
            check(entry)


def close_tiers(tiers: Mapping[str, Tier]) -> None:
    """Have every tier stop; one that cannot must not keep the others from it."""
    for name, tier in tiers.items():
        try:
            tier.close(CLOSE_S)
        except Exception:  # noqa: BLE001 - it is the tier's own code, and we are going
            _log.exception("tier %s did not close cleanly", name)


def _open_within(entry: TierSettings, context: TierContext) -> Tier:
    """Open one tier, on a thread that is left behind if it does not answer: a disk may hang, and we must not."""
    kind = load_type(entry.type)
    answers: queue.SimpleQueue[Tier | Exception] = queue.SimpleQueue()
    decided = threading.Lock()

    def run() -> None:
        try:
            answer: Tier | Exception = kind(entry, context)
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            answer = error
        # Whoever comes first, this thread or the one that gives up, takes the lock; late, a tier is ours to close.
        if decided.acquire(blocking=False):
            answers.put(answer)
        elif not isinstance(answer, Exception):
            answer.close(CLOSE_S)

    threading.Thread(target=run, name=f"kvferry-open-{entry.name}", daemon=True).start()
    try:
        answer = answers.get(timeout=entry.timeout_s)
    except queue.Empty:
        if decided.acquire(blocking=False):
            raise TierRefused(
                f"KVFERRY_TIERS: tier {entry.name} did not open within timeout_s={entry.timeout_s:g} s: see whether "
                "its disk "
                "or server answers, or give it more time"
            ) from None
        answer = answers.get(timeout=CLOSE_S)
    if isinstance(answer, TierRefused):
        raise answer
    if isinstance(answer, Exception):
        raise TierRefused(
            f"KVFERRY_TIERS: tier {entry.name} cannot be opened: {type(answer).__name__}: {answer}; see its "
            "documentation"
        ) from answer
    return answer
