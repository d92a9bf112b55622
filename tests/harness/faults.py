"""Raise exceptions in chosen methods of kvferry while it runs: at the start of a call, or after it took effect."""

from __future__ import annotations

import functools
import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.policy import PolicyResolver
from kvferry.core.pool.admission import Admission
from kvferry.core.pool.eviction.evictor import Evictor
from kvferry.core.pool.eviction.hazard import HazardPolicy
from kvferry.core.pool.eviction.history import MissHistory
from kvferry.core.pool.eviction.lru import LruPolicy
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pins
from kvferry.core.pool.slots import SlotTable
from kvferry.core.scheduler.cascades import Cascades
from kvferry.core.scheduler.inflight import InflightPrefixes
from kvferry.core.scheduler.jobs import JobTable
from kvferry.core.scheduler.lazy import LazyPlanner
from kvferry.core.scheduler.loads import LoadPlanner
from kvferry.core.scheduler.lookup import PrefixHit, PrefixLookup, RequestKeys
from kvferry.core.scheduler.prefills import Prefills
from kvferry.core.scheduler.promotions import Promotions
from kvferry.core.scheduler.requests import RequestState, RequestTable
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.scheduler.store_planner import StorePlanner
from kvferry.core.scheduler.stores import StoreJobs
from kvferry.core.scheduler.tier_loads import TierLoads
from kvferry.core.scheduler.tiering import Tiering
from kvferry.core.tiers.client import TierClient

CORE = (
    Admission, Cascades, HazardPolicy, InflightPrefixes, Inventory, JobTable, BlockIndex, LazyPlanner,
    LoadOrCompute, LoadPlanner, LruPolicy, MissHistory, OffloadManager, OffloadScheduler, Pins, PolicyResolver,
    Prefills, PrefixHit, PrefixLookup, Promotions, RequestKeys, RequestState, RequestTable, Evictor, SlotTable,
    StoreJobs, StorePlanner, TierClient, TierLoads, Tiering,
)  # fmt: skip
"""The classes that decide, all of whose methods may raise."""


class InjectedError(Exception):
    """What the injector raises."""


class Faults:
    """Patches methods so that they raise at random calls, from one seeded generator, while `enabled`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, probability: float, most: int) -> None:
        """At most `most` exceptions are raised, each call of a patched method raising with `probability`."""
        self._monkeypatch = monkeypatch
        self._rng = random.Random(seed)
        self._probability = probability
        self._lock = threading.Lock()
        self.left = most
        self.enabled = False
        self.raised: Counter[str] = Counter()

    def patch(
        self,
        cls: type,
        names: Collection[str] | None = None,
        *,
        after: bool = True,
        only_before: Collection[str] = (),
    ) -> None:
        """Patch these methods of a class, by default all that it defines. `after` allows raising after the call.

        Those in `only_before` never raise after it.

        Raises `ValueError` for a name that is not a method of this class.
        """
        methods = {name: method for name, method in vars(cls).items() if inspect.isfunction(method)}
        if names is not None and not methods.keys() >= set(names):
            raise ValueError(f"{cls.__name__} has no methods {sorted(set(names) - methods.keys())}")
        for name, method in methods.items():
            if name.startswith("__") if names is None else name not in names:
                continue
            if not inspect.isgeneratorfunction(method):
                wrapped = self._wrapped(f"{cls.__name__}.{name}", method, after=after and name not in only_before)
                self._monkeypatch.setattr(cls, name, wrapped)

    def _wrapped(self, name: str, method: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            when = self._draw(name, after=after)
            if when == "before":
                raise InjectedError(f"{name}, before")
            result = method(*args, **kwargs)
            if when == "after":
                raise InjectedError(f"{name}, after")
            return result

        return call

    def _draw(self, name: str, *, after: bool) -> str | None:
        if not self.enabled:
            return None
        with self._lock:
            if not self.left or self._rng.random() >= self._probability:
                return None
            self.left -= 1
            when = self._rng.choice(["before", "after"]) if after else "before"
            self.raised[f"{name}, {when}"] += 1
            return when

    @contextmanager
    def on(self) -> Iterator[None]:
        """Raise for as long as this lasts."""
        self.enabled = True
        try:
            yield
        finally:
            self.enabled = False
