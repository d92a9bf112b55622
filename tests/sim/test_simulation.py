"""Many seeded worlds: none breaks a promise, and together they come by everything that is known to be dangerous.

`make soak SEED=... STEPS=...` runs one world for longer, and shows a failure again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kvferry.core.scheduler.flushes import Flushes
from tests.sim.simulation import Report, simulate
from tests.sim.world import MOVES, World

SEEDS = range(140)
STEPS = 1200
CHECK_EVERY = 3
"""Checks take half of the time. A failure is shown again with a check after every step."""
RARELY, SOMETIMES, OFTEN = 12, 120, 1200
EXPECTED = {
    "loads that came": OFTEN,
    "loads that failed": SOMETIMES,
    "loaded for a full group": OFTEN,
    "loaded for a sliding group": OFTEN,
    "loaded for a recurrent group": SOMETIMES,
    "loaded a slot without its head": RARELY,
    "loaded a slot without its tail": SOMETIMES,
    "a hit was declined": SOMETIMES,
    "a hit was cut short by pins": RARELY,
    "no room on the device for what was matched": OFTEN,
    "left a prefix that others computed": OFTEN,
    "windows at a boundary were stored": RARELY,
    "waited for another's load": SOMETIMES,
    "waited for another's load, then hit": SOMETIMES,
    "waited for another's load, then found it on the device": SOMETIMES,
    "preempted": OFTEN,
    "preempted while loading": RARELY,
    "preempted with its stores in flight": SOMETIMES,
    "preempted with a step under way": SOMETIMES,
    "resumed after preemption": OFTEN,
    "aborted while loading": RARELY,
    "ended before it was scheduled": SOMETIMES,
    "ended with a step under way": OFTEN,
    "an id came again while its request was there": SOMETIMES,
    "a step's result was not wanted any more": OFTEN,
    "drafts taken back": SOMETIMES,
    "a step under way was moved back": SOMETIMES,
    "a session went on": SOMETIMES,
    "slept with stores in flight": RARELY,
    "a step failed": SOMETIMES,
    "a worker died": SOMETIMES,
    "stored ahead of a step": OFTEN,
    "a report that nobody waited for": OFTEN,
    "whole reset with stores in flight": SOMETIMES,
    "whole reset with loads in flight": RARELY,
    "reset by match with stores in flight": RARELY,
    "reset by match with loads in flight": RARELY,
    "an operator interfered": OFTEN,
    "the engine went on within an operator's call": SOMETIMES,
    "a reset was interfered with": RARELY,
    "storing was paused with stores in flight": RARELY,
    "a tenant was limited": SOMETIMES,
    "a tier was detached": RARELY,
    "a tier was attached again": RARELY,
    "blocks being prefetched": RARELY,
    "tiers: cascaded": OFTEN,
    "tiers: cascades_dropped": OFTEN,
    "given before an eviction": RARELY,
    "tiers: promoted": SOMETIMES,
    "tiers: promotions_failed": RARELY,
    "tiers: gave_up": SOMETIMES,
    "tiers: timed_out": SOMETIMES,
    "tiers: errors": SOMETIMES,
    "tokens hit in a tier": SOMETIMES,
    "waited for tiers": OFTEN,
    "waited for another's promotion": RARELY,
    "a reset met a promotion": RARELY,
    "a tier's result came twice": SOMETIMES,
    "asked to grow": SOMETIMES,
    "asked to shrink": SOMETIMES,
    "another size was wanted before that one came": RARELY,
    "asked to grow again while shrinking": RARELY,
    "a resize waited for slots in use": SOMETIMES,
    "memory could not be had": RARELY,
    "a flush began": SOMETIMES,
    "a flush was refused": SOMETIMES,
    "a flush was canceled": RARELY,
    "a flush ended: done": SOMETIMES,
    "a flush ended: reset": RARELY,
    "blocks flushed": SOMETIMES,
    "blocks left by a flush": SOMETIMES,
    "leases: accepted": SOMETIMES,
    "leases: clipped": SOMETIMES,
    "leases: rejected": SOMETIMES,
    "leases: time": SOMETIMES,
    "leases: next_request": SOMETIMES,
    "leases: operator": RARELY,
    "leases: reset": SOMETIMES,
}


def run(seed: int) -> Report:
    logging.disable(logging.CRITICAL)
    return simulate(seed, STEPS, CHECK_EVERY)


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_world_when_short_breaks_no_promise(seed: int) -> None:
    report = simulate(seed, 450)
    assert report.error is None, str(report)


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as processes:
        yield list(processes.map(run, SEEDS))


@pytest.mark.long
def test_no_world_breaks_a_promise(reports: list[Report]) -> None:
    failed = [report for report in reports if report.error is not None]
    assert not failed, "\n\n".join(map(str, failed))
    assert sum(report.num_steps for report in reports) >= 168_000


@pytest.mark.long
def test_worlds_together_reach_every_dangerous_event(reports: list[Report]) -> None:
    events: Counter[str] = Counter()
    for report in reports:
        events.update(report.events)
    rare = {name: events[name] for name, least in EXPECTED.items() if events[name] < least}
    assert not rare, f"seen too seldom to rely on: {rare}"


def test_the_same_seed_is_the_same_world_in_any_process() -> None:
    command = [sys.executable, "-m", "tests.sim", "7", "200"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = simulate(7, 200)
    assert "200 steps, all well" in str(report)
    assert ended.stdout.startswith(f"{report}\n{report.outcome}\n")
    events = dict(reversed(line.split(maxsplit=1)) for line in ended.stdout.splitlines()[2:])
    assert {name: int(count) for name, count in events.items()} == report.events


def test_worlds_notice_a_flush_that_a_reset_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flushes, "end_by_reset", lambda *_: None)
    monkeypatch.setitem(MOVES, "flush", 10.0)
    monkeypatch.setitem(MOVES, "reset_some", 3.0)
    report = next(report for seed in range(2, 40) if (report := simulate(seed, 200, CHECK_EVERY)).error is not None)
    assert "a flush goes on after a reset" in str(report)


def test_failure_report_contains_the_command_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(world: World) -> None:
        if world.num_arrived == 3:
            raise AssertionError("planted")

    monkeypatch.setattr(World, "look", lies)
    monkeypatch.setitem(MOVES, "look", 10.0)
    report = next(report for seed in range(20) if (report := simulate(seed, 200)).error is not None)
    assert "planted" in str(report)
    assert f"make soak SEED={report.seed} STEPS={report.num_steps}" in str(report)
    again = simulate(report.seed, report.num_steps)
    assert (again.num_steps, again.error is None) == (report.num_steps, False)
    assert simulate(report.seed, report.num_steps - 1).error is None
