"""Drops while blocks are stored and removed: no dropped block stays, or appears later, where it can be found."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from kvferry.app.tiers.block_store import BlockResult, Outcome
from kvferry.app.tiers.job_queue import Drop, JobKind, JobQueue, OpenJob, Worker
from kvferry.core.keys import Key
from kvferry.core.tiers.base import TierResult
from tests.harness.effort import examples
from tests.harness.tier_slots import ORIGIN, job_of, keys_of

KEYS = keys_of(range(2))


@dataclass(eq=False)
class Store:
    """A store that is open. It is dead if its block was dropped when it began, or since.

    `may_write` is what its thread last read.
    """

    job: OpenJob
    key: Key
    is_dead: bool = False
    may_write: bool = False


class World:
    """A queue of jobs, a medium, and stores, drops and removals that go on in steps of any order."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.queue = JobQueue(100, 3, 1, 1)
        self.medium: dict[Key, bool] = {}
        """Blocks by key, with whether they were dropped."""
        self.stores: dict[int, Store] = {}
        self.number = 0
        self.removal: list[tuple[Drop, bool]] = []
        self.is_removed = False

    def running(self) -> list[tuple[Worker, Store]]:
        workers = [worker for worker in self.queue.workers if worker.work is not None]
        return [(worker, self.stores[worker.work[0].number]) for worker in workers]

    def dropped(self) -> set[Key]:
        return {key for drop, _ in self.queue.open_drops() for key in drop.keys}

    def step(self) -> None:
        key, running = self.random.choice(KEYS), self.running()
        worker, store = self.random.choice(running or [(None, None)])
        # Drops are rare, so that some stores run before their block is dropped.
        match self.random.choice((0, 1, 1, 2, 2, 3, 4, 5, 7, 7, 8, 8, 8, 6)):
            case 0 if len(self.stores) < 3:
                self.number += 1
                job = OpenJob(JobKind.STORE, self.number, [key], job_of(self.number, [key], 0, [ORIGIN]))
                self.stores[self.number] = Store(job, key, is_dead=key in self.dropped())
                self.queue.submit(job, is_shut=False)
            case 1:
                self.queue.take(next(one for one in self.queue.workers if one.work is None), 0.0)
            case 2 if store is not None:
                store.may_write = store.key not in store.job.dropped
            case 3 if store is not None and store.may_write:
                self.medium[store.key] = store.is_dead
            case 4 if worker is not None:
                self.end_store(worker, store)
            case 5:
                # Another engine stores it.
                self.medium[key] = False
            case 6:
                self.queue.drop(None, [key])
                for one in self.stores.values():
                    one.is_dead |= one.key == key
                if key in self.medium:
                    self.medium[key] = True
            case 7 if not self.removal:
                self.removal, self.is_removed = self.queue.open_drops(), False
            case 8 if self.removal:
                self.remove()

    def end_store(self, worker: Worker, store: Store) -> None:
        self.queue.finish(worker, {0: BlockResult(Outcome.STORED)})
        results = {result.number: result for result in self.queue.results() if isinstance(result, TierResult)}
        assert not (store.is_dead and results[store.job.number].ok.any())
        del self.stores[store.job.number]

    def remove(self) -> None:
        """Remove the keys of the open drops, or else end these drops."""
        if not self.is_removed:
            for drop, _ in self.removal:
                for key in drop.keys:
                    self.medium.pop(key, None)
            self.is_removed = True
            return
        for drop, is_last in self.removal:
            if is_last:
                self.queue.end_drop(drop)
        self.removal = []

    def check(self) -> None:
        """Check that a key that no open drop names leads to no dropped block, now or later."""
        for key in set(KEYS) - self.dropped():
            assert not self.medium.get(key, False)
            assert not any(store.key == key and store.is_dead and store.may_write for store in self.stores.values())

    def settle(self) -> None:
        """Without a store under way, a removal ends every drop."""
        for worker, store in self.running():
            self.end_store(worker, store)
        assert all(is_last for _, is_last in self.queue.open_drops())


@pytest.mark.parametrize("seed", range(examples(40)))
def test_block_dropped_at_any_time_is_never_found(seed: int) -> None:
    world = World(seed)
    for _ in range(1000):
        world.step()
        world.check()
    world.settle()
