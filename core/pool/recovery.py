"""Recovery of the blocks that an earlier process left in the pool, which are verified before their first load."""

from __future__ import annotations

from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.pool.records import KeptBlocks
from kvferry.core.pool.slots import BATCH_SLOTS
from kvferry.core.stats import EvictionReason
from kvferry.core.transfers import Slots


def import_blocks(manager: OffloadManager, blocks: KeptBlocks, stale: Slots) -> None:
    """Fill an empty pool with the blocks of an earlier process, in time proportional to all slots.

    Args:
        manager: The manager of the pool.
        blocks: The blocks.
        stale: Slots whose row in the database is wrong or missing.

    Raises:
        RuntimeError: A slot was allocated before.
    """
    table = manager.table
    with manager.changing:
        if table.num_free < table.num_slots:
            raise RuntimeError("blocks of an earlier process can only be imported into an empty pool")
        table.import_blocks(blocks)
        manager.index.claim(blocks.slots)
        table.dirty[stale] = True
        manager.evictor.policy.admit(blocks.slots)


def begin_verification(manager: OffloadManager, start_slot: int) -> Pin:
    """Pin the next batch of unverified slots from `start_slot` on; the pin is empty at the end.

    Their bytes may be read until `end_verification`: a reset holds the slots until then.
    """
    table = manager.table
    for start in range(start_slot, table.end_slot, BATCH_SLOTS):
        with manager.changing:
            slots = table.unverified_in(start, min(start + BATCH_SLOTS, table.end_slot))
            if len(slots):
                pin = manager.pins.pin(slots)
                manager.pins.begin_read(pin, verifies=True)
                return pin
    return Pin.empty()


def end_verification(manager: OffloadManager, pin: Pin, corrupt: Slots, now_s: float) -> None:
    """Mark the slots of a pin, the object that `begin_verification` returned, as verified, and drop `corrupt` ones."""
    with manager.changing:
        if pin.epoch == manager.epoch:
            manager.drop(corrupt, EvictionReason.FAILED_VERIFICATION, now_s)
            manager.table.clear_unverified(pin.slots)
        manager.pins.end_read(pin)
