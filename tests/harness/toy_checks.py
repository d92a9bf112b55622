"""What must hold at any moment: identities, every slot in one place, every pin and hold with an owner, right bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvferry.core.pool.slots import SlotState
from kvferry.core.scheduler.jobs import StoreCause
from kvferry.core.stats import Snapshot
from kvferry.core.transfers import StepPlan
from tests.harness.toy_copies import blocks_of

if TYPE_CHECKING:
    from tests.harness.toy_engine import ToyEngine


def check_plan(plan: StepPlan) -> None:
    """A plan names a device block at most once."""
    for jobs in (plan.stores_ahead, (*plan.loads, *plan.stores)):
        named = [block_id for job in jobs for block_id in blocks_of(job)]
        assert len(named) == len(set(named)), "a plan names a device block twice"


def check(engine: ToyEngine) -> None:
    """All of it."""
    snapshot = engine.offload.snapshot()
    _check_counts(engine, snapshot)
    _check_sums(engine, snapshot)
    _check_slots(engine)
    _check_pins(engine)
    _check_holds(engine)
    _check_bytes(engine)
    _check_disowned(engine)
    _check_tiers(engine)
    _check_tenants(engine)
    cascades = engine.offload.tiers.cascades
    engine.events["given before an eviction"] += cascades.count_writing_victims()


def _check_counts(engine: ToyEngine, snapshot: Snapshot) -> None:
    store, pool, prompt, load = snapshot.store, snapshot.pool, snapshot.prompt_tokens, snapshot.load
    assert store.offered == store.stored + sum(store.skipped.values()) + store.failed + store.in_flight
    assert prompt.total == prompt.device_hit + prompt.host_hit + sum(prompt.tier_hit.values()) + prompt.recomputed
    causes = snapshot.missed_tokens.flat().values()
    assert sum(causes) == prompt.recomputed
    assert min(causes) >= 0
    assert pool.slots == pool.free + pool.ready + pool.storing
    for counts in (store, pool, prompt, load, snapshot.requests, snapshot.evictions):
        for name in counts.__slots__:
            value = getattr(counts, name)
            assert isinstance(value, (str, dict)) or value >= 0, f"{name} is {value}"
    assert min(store.skipped.values()) >= 0
    assert pool.loading <= pool.ready
    assert pool.pinned <= pool.ready
    assert snapshot.evictions.total == sum(snapshot.evictions.by_reason.values())
    assert snapshot.evictions.regretted <= snapshot.evictions.total


def _check_sums(engine: ToyEngine, snapshot: Snapshot) -> None:
    """Per request, per job and in total it is the same."""
    ledger, requests = engine.ledger, snapshot.requests
    assert (requests.seen, requests.running) == (ledger.num_seen, len(engine.requests))
    assert (requests.finished, requests.preempted) == (ledger.num_finished, ledger.num_preempted)
    assert requests.waiting_for_load == sum(r.state == "loading" for r in engine.requests.values())
    if ledger.may_sum_up():
        total, prompt = ledger.sum_up()
        assert abs(total.seconds - snapshot.store.seconds) < 1e-6, "each request has its share of a store's time"
        total.seconds = snapshot.store.seconds
        assert total == snapshot.store, f"requests sum up to {total}, in total it is {snapshot.store}"
        assert prompt == snapshot.prompt_tokens, f"requests sum up to {prompt}, in total it is {snapshot.prompt_tokens}"
    assert abs(snapshot.store.seconds - ledger.seconds["store"]) < 1e-6, "a store takes as long as its slowest worker"
    assert abs(snapshot.load.seconds - ledger.seconds["load"]) < 1e-6, "a load takes as long as its slowest worker"
    block_bytes = {group.spec.block_bytes for group in engine.groups}
    if len(block_bytes) == 1:
        (size,) = block_bytes
        assert snapshot.store.bytes == snapshot.store.stored * size
        assert snapshot.load.bytes == snapshot.load.blocks * size * engine.num_workers


def _check_slots(engine: ToyEngine) -> None:
    """Every slot is in one place: free, under one kind of transfer, or ready, and a candidate unless pinned."""
    manager, offload = engine.manager, engine.offload
    table = manager.table
    states = table.current_states(0, table.end_slot)
    pins = table.pins[: table.end_slot]
    ready = states == SlotState.READY
    assert np.count_nonzero(ready) == table.num_ready == len(manager.index)
    assert len(manager.evictor) == np.count_nonzero(ready & (pins == 0))
    loads_on = np.zeros_like(pins)
    for pin in manager.pins._loading.values():
        loads_on[pin.slots] += 1
    assert (loads_on <= pins).all(), "a slot under a load may be given out"
    assert manager.pins._loading.keys() == {id(job.pin) for job in offload._jobs if not job.is_store}
    free = set(table._free.peek_oldest(table._free.length).tolist())
    assert len(free) == table._free.length, "a slot is free twice"
    beyond = (np.flatnonzero(states[table._frontier :] == SlotState.FREE) + table._frontier).tolist()
    assert free.isdisjoint(beyond), "a slot that was given back is found again behind the frontier"
    free.update(beyond)
    assert len(free) == table.num_free, "a slot was lost, or is free twice"
    assert not free.intersection(np.flatnonzero(ready).tolist()), "a ready slot is free"
    stores = [slot for job in offload._jobs if job.is_store for slot in job.slots.tolist()]
    stores += [slot for part in offload._stores.parts for slot in part.slots.tolist()]
    loads = {slot for job in offload._jobs if not job.is_store for slot in job.slots.tolist()}
    stores += [slot for promotion in offload.tiers.loads.open for slot in promotion.slots.tolist()]
    cascading = _read_by_tiers(engine)
    under_stores = set(stores)
    assert len(stores) == len(under_stores), "a slot is under two stores"
    assert under_stores.isdisjoint(loads), "a slot is stored and loaded at once"
    assert free.isdisjoint(under_stores), "a slot under a store is free"
    assert free.isdisjoint(loads), "a slot under a load is free"
    assert free.isdisjoint(cascading), "a slot that a tier reads is free"
    assert under_stores.isdisjoint(cascading), "a slot is filled while a tier reads it"
    retired = np.flatnonzero(states == SlotState.RETIRED).tolist()
    _check_size(engine, retired, under_stores | loads | cascading, max(free, default=-1))


def _read_by_tiers(engine: ToyEngine) -> set[int]:
    return {slot for pin in engine.manager.pins._reading.values() for slot in pin.slots.tolist()}


def _check_size(engine: ToyEngine, retired: list[int], named: set[int], last_free: int) -> None:
    """What is retired holds nothing, no slot is used for which a rank has no memory, and what leaves is not given."""
    table = engine.manager.table
    assert len(retired) == table.num_retired
    assert all(slot >= table.num_slots for slot in retired), "a slot that stays was retired"
    assert last_free < table.end_slot, "a slot is free that is not there"
    # Pins of an older epoch are void.
    assert not table.pins[retired][table.epochs[retired] == table.epoch].any(), "a slot was retired under a pin"
    assert named.isdisjoint(retired), "a slot was retired under a transfer"
    assert max(named, default=-1) < table.end_slot, "a transfer touches a slot that is not there"
    assert all(len(rows) >= table.end_slot for rows in engine.copies.host), "a rank has no memory for a slot"


def _check_pins(engine: ToyEngine) -> None:
    """No pin without an owner, and no owner without its pin."""
    manager, epoch = engine.manager, engine.manager.epoch
    owned = [0] * manager.table.end_slot
    num_hit = 0
    pins = [record.state.load.pin for record in engine.ledger.live.values() if record.state.load.pin is not None]
    num_hit = sum(map(len, pins))
    assert engine.offload._loads._num_pinned == num_hit
    transfers = (job.pin for job in engine.offload._jobs if job.pin is not None)
    for pin in (*pins, *transfers, *manager.pins._reading.values()):
        if pin.epoch == epoch:
            for slot in pin.slots.tolist():
                owned[slot] += 1
    for key in manager.operator_pins.expiries._until_s:
        slot = manager.index.get(key)
        assert slot is not None, "an operator pins what is not there"
        owned[slot] += 1
    leases = manager.leases
    for key, block in leases._blocks.items():
        slot = manager.index.get(key)
        assert (slot is None) == block.is_pending, "a lease has a block that is not there, or does not know that it is"
        assert block.num_leases > 0
        if slot is not None:
            owned[slot] += 1
    counts = leases.counts
    assert counts.slots + counts.pending == leases.num_blocks
    assert counts.pending == sum(block.is_pending for block in leases._blocks.values())
    assert Counter(block.tenant for block in leases._blocks.values()) == leases._num_of
    ready = manager.table.is_ready(np.arange(manager.table.end_slot))
    if manager.pins._freed_when_unpinned:
        ready[list(manager.pins._freed_when_unpinned)] = True
    assert not np.array(owned)[~ready].any(), "a slot is pinned that holds no block"
    assert (manager.table.pins[: len(ready)][ready] == np.array(owned)[ready]).all(), (
        "a pin without an owner, or the reverse"
    )


def _check_holds(engine: ToyEngine) -> None:
    """Device blocks are held for the jobs that are open or decided, and for nothing else."""
    held = [0] * len(engine.device.held)
    for job in engine.offload._jobs:
        for block_id in [] if any(part.cause is StoreCause.REUSED for part in job.parts) else blocks_of(job.job):
            held[block_id] += 1
    for part in engine.offload._stores.parts:
        for block_id in part.block_ids:
            held[block_id] += 1
    assert engine.device.held == held, "a device block is held for nobody, or not held for a job"


def _check_bytes(engine: ToyEngine) -> None:
    """Everything that can be found was allowed to be stored, and holds the right values on every rank."""
    truth, grants, hosts = engine.truth, engine.ledger.grants, engine.copies.host
    table = engine.manager.table
    for slot in table.is_ready(np.arange(table.end_slot)).nonzero()[0].tolist():
        key = table.keys[slot]
        assert engine.manager.index.get(key) == slot, f"slot {slot} is ready and cannot be found"
        assert key in grants, "something was stored that no policy ever allowed"
        values = truth.of(key)
        for host in hosts:
            assert host[slot][: len(values)] == values, f"slot {slot} can be found and holds something else"


def _check_disowned(engine: ToyEngine) -> None:
    """What a reset met under way is never published."""
    disowned, table = engine.ledger.disowned, engine.manager.table
    for slot, generation in list(disowned.items()):
        if table.generations[slot] != generation:
            del disowned[slot]
        else:
            assert not table.is_ready(np.array([slot]))[0], "what was under way at a reset was published"


def _check_tiers(engine: ToyEngine) -> None:
    """Tiers are treated as they may expect, touch only what is theirs, and hold what they were given."""
    side = engine.offload.tiers
    held = _read_by_tiers(engine)
    assert side.cascades.num_held == len(held) <= max(engine.manager.table.last_end_slot // 4, 1), (
        "cascades hold too much"
    )
    looks = [record.state.tiers.lookup for record in engine.ledger.live.values()]
    assert all(look is None or min(look.waits_for.values(), default=1) > 0 for look in looks)
    for client in side.clients:
        tier = engine.tiers[client.name]
        assert not tier.wrongs, tier.wrongs
        assert tier.holds_right_bytes(), f"{client.name} holds wrong bytes"
        assert tier.blocks.keys() <= engine.ledger.grants, "a tier has what no policy ever allowed to be stored"
        ours = {slot for job in client.open_jobs for slot in job.slots.tolist()}
        assert tier.touched_slots <= ours, "a tier may touch slots that it was told to let go of"
        assert client.bytes_in_flight >= 0
        assert client.num_unawaited >= 0
        use = client.counts()[1]
        assert all((getattr(use, name) or 0) >= 0 for name in use.__slots__)
        assert use.found <= use.looked_up


def _check_tenants(engine: ToyEngine) -> None:
    """Tenants have as many slots as are counted, none beyond its limit got more, and candidates are in their queues."""
    manager = engine.manager
    table, tenants = manager.table, manager.table.tenants
    states = table.current_states(0, table.end_slot)
    numbers = tenants._records["tenant"][: table.end_slot]
    is_used = (states != SlotState.FREE) & (states != SlotState.RETIRED)
    used = Counter(tenants.names[number] for number in numbers[is_used].tolist())
    assert used == tenants.used_in(0, len(tenants.names)), "slots of tenants are not counted right"
    if not tenants.is_limiting:
        return
    limits, (before, used_before, moved_before) = engine.limits, engine.ledger.tenants
    # What a tier brings counts with the tenant that first stored it, for another tenant's request, too.
    uses = [client.use for client in engine.offload.tiers.clients]
    moved = sum(use.prefetched + use.promoted for use in uses)
    limit_of = {tenant: tenants.limit_of(tenant) for tenant in used}
    for tenant, limit in limit_of.items():
        if limit is not None and before.get(tenant) == limit and moved == moved_before:
            had, has = used_before[tenant], used[tenant]
            assert has <= max(limit, had), f"{tenant} has {has} slots, had {had}, and its limit is {limit}"
    engine.ledger.tenants = limit_of, used, moved
    if limits._scan_from is not None or len(limits._unqueued) or limits._version != tenants.version:
        return
    is_candidate = (states == SlotState.READY) & (table.pins[: table.end_slot] == 0)
    candidates = Counter(tenants.names[number] for number in numbers[is_candidate].tolist())
    for tenant, limit in limit_of.items():
        if tenant is not None and limit is not None:
            assert tenants.num_queued(tenant) == candidates[tenant], f"{tenant} has others in its queue"


def check_closed(engine: ToyEngine) -> None:
    """No tier may still touch a slot."""
    for name, tier in engine.tiers.items():
        assert not tier.wrongs, tier.wrongs
        assert not tier.touched_slots, f"{name} may still touch slots"


def check_idle(engine: ToyEngine) -> None:
    """Nothing is left: no pin, hold, job, nothing in flight, nobody waiting."""
    snapshot, device = engine.offload.snapshot(), engine.device
    assert snapshot.open_jobs == 0
    assert (snapshot.store.in_flight, snapshot.load.in_flight) == (0, 0)
    assert (snapshot.pool.storing, snapshot.pool.loading, snapshot.pool.pinned) == (0, 0, 0)
    assert (snapshot.requests.running, snapshot.requests.waiting_for_load) == (0, 0)
    assert not any(device.refs)
    assert not any(device.held)
    assert len(device.free) == device.num_usable
    loads, stores, tiers = engine.offload._loads, engine.offload._stores, engine.offload.tiers
    promotions, cascades, demands = engine.offload._promotions, tiers.cascades, engine.offload._demands
    left = {
        "loads": [*loads._inflight.loaders, *loads.pending, *loads.lost],
        "pins of loads": loads._num_pinned,
        "stores": [*stores.storing, *stores.parts, *filter(None, stores.in_flight.values())],
        "holds": [*engine.offload._jobs._held, *engine.offload._jobs.unowned],
        "demands": [*demands.open, *demands._open_blocks],
        "promotions": [*tiers.loads.open, *tiers.loads._num_loading],
        "slots promoted early": promotions._num_early_slots,
        "early promotions": [*promotions._arrived, *promotions._early],
        "cascades": [*cascades._open, *cascades._num_readers.nonzero()[0].tolist()],
        "leases": [*engine.manager.leases._leases, *engine.manager.leases._blocks, *engine.manager.leases._ended],
        "flushes": [*tiers.flushes._holding, *engine.manager.evictor._places],
        "look-ups": [client.name for client in tiers.clients if client.num_unawaited],
    }
    assert not any(left.values()), {name: what for name, what in left.items() if what}
    assert not any(client.open_jobs or client.open_resets or client.bytes_in_flight for client in tiers.clients)
    table = engine.manager.table
    assert not table.pins[: table.end_slot][table.is_ready(np.arange(table.end_slot))].any()
    assert not engine.resize.is_open
    assert (table.num_slots, table.num_retired) == (engine.manager.table.target_slots, 0)
