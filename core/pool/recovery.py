"""Recovery of the pool: of its blocks after an exception, and of those that an earlier process left in its file."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.pool.records import RecoveredBlocks
from kvferry.core.pool.slots import SlotState
from kvferry.core.stats import EvictionReason
from kvferry.core.transfers import Slots


def recover(
    manager: OffloadManager, filled: Slots, loads: Iterable[Pin], reads: Iterable[Pin], now_s: float
) -> list[Exception]:
    """Undo the effects of an exception, and drop all blocks if it interrupted a change of the pool.

    Slots that are being stored are freed and blocks unpinned, but for open transfers, operators and leases. No
    store that was open before may be completed. Takes time proportional to the pool.

    Args:
        manager: The manager of the pool.
        filled: Slots that open transfers write to.
        loads: The pins of open loads.
        reads: The pins of open cascades.
        now_s: The time.

    Returns:
        Exceptions in eviction policy, header queue or sink, which did not prevent the recovery. Blocks of an older
        epoch that a restart finds because of them still have the bytes of their keys.
    """
    errors: list[Exception] = []
    with manager.lock:
        manager.pins.keep_only(loads, reads)
        try:
            if not manager.changing.is_torn and _keep_blocks(manager, filled):
                return errors
        except Exception as error:  # noqa: BLE001 - returned; dropping all blocks relies on none of its effects
            errors.append(error)
        # Torn until all blocks are dropped.
        manager.changing.is_torn = True
        errors += manager.begin_epoch(filled, now_s)[1]
        manager.changing.is_torn = False
    return errors


def _keep_blocks(manager: OffloadManager, filled: Slots) -> bool:
    """Free slots and undo pins without an owner. Returns False if the pool is inconsistent."""
    table = manager.table
    with manager.changing:
        manager.invalidate(filled)
        is_lost = table.current_states(0, table.end_slot) == SlotState.STORING
        is_lost[filled] = False
        manager.abort_store(is_lost.nonzero()[0])
        owned = np.concatenate((manager.operator_pins.slots(), manager.leases.slots()))
        if not manager.pins.recount(filled, owned):
            return False
        states, pins = table.current_states(0, table.end_slot), table.pins[: table.end_slot]
        is_ready = states == SlotState.READY
        return (
            int(np.count_nonzero(is_ready)) == table.num_ready == len(manager.index)
            and len(manager.evictor) == int(np.count_nonzero(is_ready & (pins == 0)))
            and table.num_free == int(np.count_nonzero(states == SlotState.FREE))
        )


def import_blocks(manager: OffloadManager, blocks: RecoveredBlocks, stale: Slots) -> None:
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
        manager.evictor.admit(blocks.slots)


def begin_verification(manager: OffloadManager, start_slot: int) -> Pin:
    """Pin the next batch of unverified slots from `start_slot` on; the pin is empty at the end.

    Their bytes may be read until `end_verification`: a reset holds the slots until then.
    """
    table = manager.table
    for start in range(start_slot, table.end_slot, table.batch_slots):
        with manager.changing:
            slots = table.unverified_in(start, min(start + table.batch_slots, table.end_slot))
            if len(slots):
                return begin_verification_of(manager, slots)
    return Pin.empty()


def begin_verification_of(manager: OffloadManager, slots: Slots) -> Pin:
    """Pin those of some slots that are ready and unverified, as `begin_verification` does."""
    table = manager.table
    with manager.changing:
        pin = manager.pins.pin(table.unverified_of(slots[table.is_ready(slots)]))
        if len(pin):
            manager.pins.begin_read(pin, verifies=True)
    return pin


def end_verification(manager: OffloadManager, pin: Pin, corrupt: Slots, now_s: float) -> None:
    """Mark the slots of a pin as verified, and drop `corrupt` ones. `pin` is the object that has begun it."""
    with manager.changing:
        if pin.epoch == manager.epoch:
            manager.drop(corrupt, EvictionReason.FAILED_VERIFICATION, now_s)
            manager.table.clear_unverified(pin.slots)
        manager.pins.end_read(pin)
