"""Cost of pool decisions: microseconds per block of the manager's store path and load path.

Run: python -m bench.manager [--slots 50000 1000000 10000000] [--rounds 7] [--policies lru arc hazard]

Store path: 64 keys that are not in the full pool are offered, which evicts 64 slots and records them, and published.
Load path: 64 keys in the pool are matched and pinned, and a load begins and ends. The baseline, measured alternately,
is the minimum in Python: one OrderedDict from key to slot, without states, pins or history.

With `--policies` the store path of whole requests under each eviction policy, in turns over the same requests, in CPU
time: 64 to 1,024 keys, in offers of 64 with the request's earlier keys as prefix, and for a policy that learns the
reports of the scheduler. `new` are requests of new keys only; of `again` one in four repeats one of the latest 50. The
ratio is to the first policy.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np

from bench.report import environment, spread
from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.pool.events import CacheEvent, EvictionBatch
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.manager import OffloadManager

BATCH = 64
KEY_BYTES = 33
KEYS_THROUGH = 200_000
REQUEST_KEYS = 64, 1024
REPORTED_KEYS = 512
"""Keys that the scheduler reports in one call."""
REPEATED = 50
FILLS = 5
"""Times that new keys fill the pool before policies are measured: `hazard` remembers five keys for each slot."""


class QueueingSink:
    """A sink that does the journal's work under the lock: a bounded append."""

    def __init__(self) -> None:
        self.batches: deque[EvictionBatch] = deque(maxlen=100)

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, EvictionBatch):
            self.batches.append(event)


class BareManager:
    """The baseline: an OrderedDict as LRU index."""

    def __init__(self, num_slots: int) -> None:
        self.slots: OrderedDict[bytes, int] = OrderedDict()
        self.free = list(range(num_slots))

    def store(self, keys: Sequence[bytes]) -> None:
        slots, free = self.slots, self.free
        for key in keys:
            if key not in slots:
                slots[key] = free.pop() if free else slots.popitem(last=False)[1]

    def load(self, keys: Sequence[bytes]) -> list[int]:
        slots = self.slots
        found = []
        for key in keys:
            found.append(slots[key])
            slots.move_to_end(key)
        return found


def batches(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]


def measure(run: Callable[[list[bytes]], object], work: list[list[bytes]]) -> float:
    """Return microseconds per block."""
    gc.collect()
    started = time.perf_counter()
    for batch in work:
        run(batch)
    return (time.perf_counter() - started) / sum(map(len, work)) * 1e6


def bench(num_slots: int, rounds: int, rng: random.Random) -> None:
    origin, positions = RequestIdentity("bench"), np.arange(BATCH)
    manager = OffloadManager(num_slots, 4096, sink=QueueingSink())
    bare = BareManager(num_slots)

    def store(keys: list[bytes]) -> None:
        answer = manager.prepare_store(keys, origin, positions[: len(keys)], 1, 1.0)
        manager.complete_store(answer.slots, 2.0)

    def load(keys: list[bytes]) -> None:
        pin = manager.pin(manager.lookup(keys))
        manager.prepare_load(pin, 3.0)
        manager.complete_load(pin)

    for _ in range(0, num_slots, KEYS_THROUGH):
        fill = batches([rng.randbytes(KEY_BYTES - 1) + b"\0" for _ in range(min(KEYS_THROUGH, num_slots))])
        for batch in fill:
            store(batch)
            bare.store(batch)
    times: dict[str, list[float]] = {name: [] for name in ("store", "bare store", "load", "bare load")}
    ratios: dict[str, list[float]] = {"store": [], "load": []}
    for _ in range(rounds):
        work = batches([rng.randbytes(KEY_BYTES - 1) + b"\0" for _ in range(KEYS_THROUGH)])
        times["store"].append(measure(store, work))
        times["bare store"].append(measure(bare.store, work))
        held = work[-(min(num_slots, KEYS_THROUGH) // BATCH) + 1 :]
        rng.shuffle(held)
        times["load"].append(measure(load, held))
        times["bare load"].append(measure(bare.load, held))
        for side in ratios:
            ratios[side].append(times[side][-1] / times[f"bare {side}"][-1])
    for side in ratios:
        print(
            f"{num_slots:>10,}  {side:<5}  {spread(times[side]):<22}  {spread(times[f'bare {side}']):<22}  "
            f"{spread(ratios[side])}"
        )


class Requests:
    """Generated requests: keys, tokens of the answer and time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._latest: deque[list[Key]] = deque(maxlen=REPEATED)
        self._now_s = 0.0

    def make(self, num_keys: int, again: bool) -> list[tuple[list[Key], int, float]]:
        """Return requests of about `num_keys` keys; with `again` one in four repeats one of the latest."""
        rng, made = self._rng, []
        while num_keys > 0:
            if again and self._latest and rng.random() < 0.25:
                keys = rng.choice(self._latest)
            else:
                keys = [rng.randbytes(KEY_BYTES - 1) + b"\0" for _ in range(rng.randint(*REQUEST_KEYS))]
                self._latest.append(keys)
            num_keys -= len(keys)
            self._now_s += 0.3
            made.append((keys, rng.choice((10, 100, 400, 900)), self._now_s))
        return made


def serve(manager: OffloadManager, requests: Sequence[tuple[list[Key], int, float]]) -> float:
    """Store what is missing of each request, with reports to a policy that learns; return CPU microseconds a key."""
    origin, positions = RequestIdentity("bench"), np.arange(REQUEST_KEYS[1])
    gc.collect()
    began_s = time.thread_time()
    for keys, num_output_tokens, now_s in requests:
        parts = [keys[start : start + REPORTED_KEYS] for start in range(0, len(keys), REPORTED_KEYS)]
        if manager.is_learning:
            for part in parts:
                manager.record_uses(part, now_s)
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            prefix = Prefix({0: (keys, start)})
            answer = manager.prepare_store(batch, origin, positions[start : start + len(batch)], 1, now_s, prefix)
            manager.complete_store(answer.slots, now_s)
        if manager.is_learning:
            for part in parts:
                manager.record_end(part, num_output_tokens, now_s)
            manager.record_request(now_s)
    return (time.thread_time() - began_s) / sum(len(keys) for keys, _, _ in requests) * 1e6


def bench_policies(num_slots: int, policies: Sequence[str], rounds: int, rng: random.Random) -> None:
    """Print the CPU time of the store path under each policy."""
    managers = {name: OffloadManager(num_slots, 4096, name, sink=QueueingSink()) for name in policies}
    requests = Requests(rng)
    for _ in range(0, FILLS * num_slots, KEYS_THROUGH):
        fill = requests.make(KEYS_THROUGH, again=True)
        for manager in managers.values():
            serve(manager, fill)
    times: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in ("new", "again") for name in policies}
    for number in range(rounds):
        for kind in ("new", "again"):
            work = requests.make(KEYS_THROUGH, again=kind == "again")
            for turn in range(len(policies)):
                name = policies[(turn + number) % len(policies)]
                times[kind, name].append(serve(managers[name], work))
    for (kind, name), own in times.items():
        ratios = [mine / first for mine, first in zip(own, times[kind, policies[0]], strict=True)]
        print(f"{num_slots:>10,}  {kind:<5}  {name:<8}  {spread(own):<22}  {spread(ratios, 2)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[50_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", nargs="+", choices=EVICTION_POLICIES, help="compare these instead")
    options = parser.parse_args()
    print(environment("numpy", "numba"))
    if options.policies:
        print(f"microseconds of CPU time a key, {KEYS_THROUGH:,} keys a round: median (min-max)")
        print(f"{'slots':>10}  {'keys':<5}  {'policy':<8}  {'time':<22}  ratio")
        for num_slots in options.slots:
            bench_policies(num_slots, options.policies, options.rounds, random.Random(options.seed))
        return
    print(f"microseconds a block, batches of {BATCH}, {KEYS_THROUGH:,} keys a round: median (min-max)")
    print(f"{'slots':>10}  {'path':<5}  {'kvferry':<22}  {'bare OrderedDict':<22}  ratio")
    for num_slots in options.slots:
        bench(num_slots, options.rounds, random.Random(options.seed))


if __name__ == "__main__":
    main()
