"""What slots are in use for: who keeps those that a shrinking pool waits for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from kvferry.core.manager import OffloadManager
from kvferry.core.slots import BATCH_SLOTS, SlotState


@dataclass(frozen=True, slots=True)
class SlotUses:
    """Slots in use, each counted once.

    `filling`: stored into, or brought by a tier; `loading`: read by a load; `reading`: read by a tier, or verified;
    `waiting`: found by requests that have not begun to load, or kept by their operators' pins.
    """

    filling: int = 0
    loading: int = 0
    reading: int = 0
    waiting: int = 0

    def __str__(self) -> str:
        words = (
            (self.filling, "being stored, or brought by a tier"),
            (self.loading, "being loaded"),
            (self.reading, "being read by a tier, or verified"),
            (self.waiting, "pinned, or found by requests that wait"),
        )
        return ", ".join(f"{count:,} {what}" for count, what in words if count) or "none"

    def __add__(self, other: SlotUses) -> SlotUses:
        return SlotUses(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def uses_of(manager: OffloadManager, start: int, end: int) -> SlotUses:
    """What the slots in a range are in use for. Looked at in batches, so not quite of one moment."""
    uses = SlotUses()
    for at in range(start, end, BATCH_SLOTS):
        uses += _uses_of_batch(manager, at, min(at + BATCH_SLOTS, end))
    return uses


def _uses_of_batch(manager: OffloadManager, start: int, end: int) -> SlotUses:
    table, pins = manager.table, manager.pins
    with manager.lock:
        states = table.current_states(start, end)
        held = (states == SlotState.HELD) | ((states == SlotState.READY) & (table.pins[start:end] > 0))
        slots = held.nonzero()[0] + start
        if not len(slots):
            return SlotUses(filling=int(np.count_nonzero(states == SlotState.STORING)))
        loading = np.isin(slots, pins.loading_slots())
        reading = ~loading & np.isin(slots, pins.reading_slots())
    num_loading, num_reading = int(np.count_nonzero(loading)), int(np.count_nonzero(reading))
    num_filling = int(np.count_nonzero(states == SlotState.STORING))
    return SlotUses(num_filling, num_loading, num_reading, len(slots) - num_loading - num_reading)
