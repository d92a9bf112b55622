"""Exceptions in kvferry's own code, in every hook and collaborator: requests are answered, nothing leaks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict

import pytest

from kvferry.app.engines.embedded import FinishReason
from kvferry.app.engines.embedded.offload import Offload
from kvferry.app.engines.embedded.request import Request
from kvferry.app.guard import MAX_ERRORS
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler
from tests.harness.embedded import (
    Answer,
    ask,
    ask_all,
    greedy,
    run,
    until,
)
from tests.harness.identities import check_identities
from tests.harness.offloading import MakeOffloaded, Offloaded

MAX_TOKENS = 8
SMALL = {"device_blocks": 32, "block_size": 4, "max_running": 8}
HOOKS = sorted(name for name in vars(Offload) if not name.startswith("_"))
SEED = int(os.environ.get("FAULT_SEED", "1"))
NUM_FAULTS = int(os.environ.get("FAULTS", "60"))
"""Random faults in one run; 1,000 take a few minutes."""


def assert_answered(offloaded: Offloaded, prompts: list[list[int]], answers: list[list[int]]) -> None:
    got = ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
    assert [answer.token_ids for answer in got] == answers


def assert_nothing_left(offloaded: Offloaded) -> None:
    """Every transfer has ended, and no device block, pin or slot is lost."""
    run(until(offloaded.settled, "all transfers have ended"))
    stats = offloaded.stats
    check_identities(asdict(stats))
    assert (stats.requests.running, stats.requests.waiting_for_load, stats.open_jobs) == (0, 0, 0)
    assert (stats.pool.storing, stats.pool.loading, stats.pool.pinned) == (0, 0, 0)
    assert offloaded.engine.pool.num_held == 0
    assert offloaded.engine.pool.num_free == offloaded.engine.settings.device_blocks


def assert_offloads(offloaded: Offloaded, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Blocks are stored and loaded again, with offloading switched on where it is off."""
    offloaded.guard.reset(0.0)
    before = offloaded.stats.prompt_tokens.host_hit
    for _ in range(2):
        assert_answered(offloaded, prompts, answers)
    assert offloaded.guard.status.is_on
    assert offloaded.stats.prompt_tokens.host_hit > before


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.long)], ids=["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_requests_are_answered_when_a_hook_raises(
    hook: str,
    after: bool,
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offloaded = make_offloaded(**SMALL)
    plain = getattr(OffloadScheduler, hook)
    calls = 0

    def fail(self: OffloadScheduler, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 5 != 1 or calls > 5 * (MAX_ERRORS - 1):
            return plain(self, *args)
        if after:
            plain(self, *args)
        raise RuntimeError(f"{hook} failed, says the test")

    monkeypatch.setattr(OffloadScheduler, hook, fail)
    for _ in range(2):
        assert_answered(offloaded, prompts, answers)
    if hook not in ("on_step_failed", "on_preempted"):
        run(until(lambda: offloaded.guard.status.num_errors > 0, "the hook has failed"))
    assert offloaded.guard.status.is_on
    assert offloaded.engine.last_error is None
    monkeypatch.undo()
    assert_offloads(offloaded, prompts, answers)
    assert_nothing_left(offloaded)


def test_offloading_is_off_after_repeated_errors_until_a_reset(
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    offloaded = make_offloaded(**SMALL)
    calls = 0

    def fail(self: OffloadManager, *args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("no offer, says the test")

    monkeypatch.setattr(OffloadManager, "prepare_store", fail)
    assert_answered(offloaded, prompts, answers)
    status = offloaded.guard.status
    assert not status.is_on
    assert calls == MAX_ERRORS
    assert "no offer, says the test" in offloaded.guard.degraded()[0]
    assert "POST /admin/v1/reset" in offloaded.guard.degraded()[0]
    traces = [record for record in caplog.records if record.exc_info is not None]
    assert len(traces) == 1, "the traceback is logged once"
    assert_nothing_left(offloaded)
    monkeypatch.undo()
    assert_answered(offloaded, prompts, answers)
    assert offloaded.stats.prompt_tokens.host_hit == 0
    assert_offloads(offloaded, prompts, answers)
    assert offloaded.guard.degraded() == []


def test_a_state_that_cannot_be_discarded_is_off_until_a_reset(
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offloaded = make_offloaded(**SMALL)
    assert_answered(offloaded, prompts, answers)

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError("broken, says the test")

    for method in ("abandon_all", "plan_step"):
        monkeypatch.setattr(OffloadScheduler, method, fail)
    assert_answered(offloaded, prompts, answers)
    assert not offloaded.guard.status.is_on
    monkeypatch.undo()
    assert_offloads(offloaded, prompts, answers)
    assert_nothing_left(offloaded)


def test_other_requests_are_answered_when_one_cannot_go_on(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = make_offloaded(**SMALL)
    plain = Request.append

    def append(self: Request, *args: object) -> object:
        if self.request_id == "bad":
            raise RuntimeError("no text, says the test")
        return plain(self, *args)

    monkeypatch.setattr(Request, "append", append)

    async def both() -> tuple[Answer, Answer]:
        bad = ask(offloaded.engine, prompts[1], greedy(MAX_TOKENS), request_id="bad")
        return await asyncio.gather(bad, ask(offloaded.engine, prompts[2], greedy(MAX_TOKENS)))

    bad, good = run(both())
    assert bad.reason is FinishReason.ERROR
    assert good.token_ids == answers[2]
    assert_nothing_left(offloaded)
