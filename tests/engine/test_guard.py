"""Exceptions in kvferry's own code, in every hook and collaborator: requests are answered, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from kvferry.app.engines.embedded.request import FinishReason, Request
from kvferry.app.engines.embedded.scheduler import Offload
from kvferry.app.engines.embedded.tokenizer import CheckpointTokenizer
from kvferry.app.guard import ERROR_WINDOW_S, MAX_ERRORS, ErrorLog, OffloadGuard
from kvferry.app.guard.guard import DISCARD_EVERY_S
from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.policy import PolicyResolver
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pins
from kvferry.core.scheduler import requests, scheduler
from kvferry.core.scheduler.loads import LoadPlanner
from kvferry.core.scheduler.lookup import PrefixLookup, RequestKeys
from kvferry.core.scheduler.requests import RequestState, RequestTable
from kvferry.core.scheduler.scheduler import Miss, OffloadScheduler
from kvferry.core.transfers import Direction, TransferResult
from tests.harness.embedded import (
    Answer,
    ask,
    ask_all,
    greedy,
    run,
    until,
)
from tests.harness.identities import check_identities
from tests.harness.offloading import GatedCopies, MakeOffloaded, Offloaded

MAX_TOKENS = 4
SMALL = {"device_blocks": 32, "block_size": 4, "max_running": 8}
HOOKS = sorted(name for name in vars(Offload) if not name.startswith("_"))


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
    assert offloaded.engine.block_pool.num_held == 0
    assert offloaded.engine.block_pool.num_free == offloaded.engine.settings.device_blocks


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

    def fail(self: OffloadScheduler, *args: object, **fields: object) -> object:
        nonlocal calls
        calls += 1
        if calls % 5 != 1 or calls > 5 * (MAX_ERRORS - 1):
            return plain(self, *args, **fields)
        if after:
            plain(self, *args, **fields)
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


OWN = [
    *[("on_new_request", *place) for place in (
        (scheduler, "parse_request_fields"), (PolicyResolver, "resolve"), (PolicyResolver, "defaults"),
        (requests, "_resolve_policy"), (RequestKeys, "__init__"), (RequestTable, "next_sequence"),
        (requests, "RequestIdentity"), (Request, "kv_transfer_params"), (Request, "tenant"),
    )],
    *[("match", *place) for place in (
        (RequestKeys, "extend_loadable"), (RequestKeys, "extend"), (RequestKeys, "loadable_tokens"),
        (RequestState, "update_policy"), (PolicyResolver, "resolve"), (LoadPlanner, "find"), (PrefixLookup, "find"),
        (PrefixLookup, "find_boundary"), (OffloadManager, "lookup"), (BlockIndex, "find_prefix"),
        (Request, "block_hashes"),
    )],
]  # fmt: skip
"""Collaborators of a hook that are called before any change of state: hook, owner and name."""
SHARED = [
    ("on_new_request", RequestTable, "add"),
    ("match", LoadPlanner, "match"), ("match", OffloadManager, "pin"), ("match", Pins, "pin"),
    ("match", LoadOrCompute, "should_load"),
]  # fmt: skip
"""Collaborators of a hook that change state, or are called after a change."""


def fail_in(patch: pytest.MonkeyPatch, hook: str, owner: Any, name: str, request_id: str = "bad") -> list[str]:
    """Have one collaborator raise in one hook of one request; the list returned grows with each exception."""
    raised: list[str] = []
    current: list[str] = []
    plain = getattr(OffloadScheduler, hook)

    def call(self: OffloadScheduler, request: Any, *args: object, **fields: object) -> object:
        current.append(request if isinstance(request, str) else request.request_id)
        try:
            return plain(self, request, *args, **fields)
        finally:
            current.clear()

    def check() -> None:
        if current == [request_id]:
            raised.append(name)
            raise RuntimeError(f"{name} failed, says the test")

    patch.setattr(OffloadScheduler, hook, call)
    if owner is Request:
        # A field of the object: a property of the class goes before it.
        def read(self: Request) -> object:
            check()
            return vars(self)[name]

        patch.setattr(
            Request, name, property(read, lambda self, value: vars(self).update({name: value})), raising=False
        )
    else:
        found = getattr(owner, name)

        def fail(*args: Any, **kwargs: Any) -> object:
            check()
            return found(*args, **kwargs)

        patch.setattr(owner, name, fail)
    return raised


@pytest.mark.parametrize(("hook", "owner", "name"), OWN, ids=[f"{hook}-{name}" for hook, _, name in OWN])
def test_an_error_before_any_change_concerns_its_request_only(
    hook: str,
    owner: Any,
    name: str,
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    offloaded = make_offloaded(**SMALL)
    assert_answered(offloaded, prompts, answers)
    run(until(offloaded.settled, "all blocks are stored"))
    # The device forgets all: a request with its whole context.
    run(ask(offloaded.engine, [7] * (4 * 32 - 2), greedy(1)))
    run(until(offloaded.settled, "its blocks are stored"))
    before = offloaded.stats
    with monkeypatch.context() as patch:
        raised = fail_in(patch, hook, owner, name)
        if hook == "match" and owner in (PolicyResolver, RequestState):
            announce = OffloadScheduler.on_new_request

            def change_policies(self: OffloadScheduler, *args: Any) -> None:
                announce(self, *args)
                self.policies.version += 1

            patch.setattr(OffloadScheduler, "on_new_request", change_policies)
        for request_id, at in (("bad", 4), ("good", 5), ("other", 4)):
            answer = run(ask(offloaded.engine, prompts[at], greedy(MAX_TOKENS), request_id=request_id))
            assert answer.token_ids == answers[at]
    assert raised
    status, stats = offloaded.guard.status, offloaded.stats
    assert status.is_on
    assert status.num_errors == 1
    assert "says the test" in str(status.last_error)
    assert [one.exc_info is not None for one in caplog.records if one.levelname == "ERROR"] == [True], "logged once"
    assert stats.epoch == before.epoch
    assert stats.prompt_tokens.host_hit > before.prompt_tokens.host_hit
    assert stats.evictions.total == before.evictions.total
    bad = offloaded.scheduler.requests.find("bad", 0.0)
    if len(raised) > 1:
        # What a request is shown by has failed too.
        assert (bad, stats.requests.excluded) == (None, 0)
    else:
        assert stats.requests.excluded == 1
        assert bad is not None
        assert bad.error == f"{hook}: RuntimeError"
        whole_blocks = (len(prompts[4]) - 1) // 4 * 4
        assert bad.missed_tokens.causes["error"] == whole_blocks - bad.prompt_tokens.device_hit
        assert bad.store.offered == 0
    good = offloaded.scheduler.requests.find("good", 0.0)
    assert good is not None
    assert good.error is None
    assert_nothing_left(offloaded)


@pytest.mark.parametrize(("hook", "owner", "name"), SHARED, ids=[f"{hook}-{name}" for hook, _, name in SHARED])
def test_an_error_in_a_change_concerns_all_requests(
    hook: str,
    owner: Any,
    name: str,
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offloaded = make_offloaded(**SMALL)
    assert_answered(offloaded, prompts, answers)
    run(until(offloaded.settled, "all blocks are stored"))
    discarded: list[float] = []
    plain = OffloadScheduler.abandon_all

    def abandon_all(self: OffloadScheduler, *args: Any) -> object:
        discarded.append(1)
        return plain(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadScheduler, "abandon_all", abandon_all)
        raised = fail_in(patch, hook, owner, name)
        answer = run(ask(offloaded.engine, prompts[4], greedy(MAX_TOKENS), request_id="bad"))
        assert answer.token_ids == answers[4]
    assert len(raised) == len(discarded) == 1
    assert offloaded.stats.requests.excluded == 0
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

    def fail(self: OffloadScheduler, *args: object) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("no match, says the test")

    monkeypatch.setattr(OffloadScheduler, "match", fail)
    for _ in range(2):
        assert_answered(offloaded, prompts, answers)
    status = offloaded.guard.status
    assert not status.is_on
    assert calls == MAX_ERRORS
    assert "no match, says the test" in offloaded.guard.degraded()[0]
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


def test_jobs_end_when_poll_of_the_copy_engine_always_raises(
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offloaded = make_offloaded(**SMALL)
    assert_answered(offloaded, prompts, answers)
    run(until(offloaded.settled, "the stores have ended"))

    def fail() -> list[TransferResult]:
        offloaded.copies._pass_on()
        raise RuntimeError("poll failed, says the test")

    with monkeypatch.context() as patch:
        patch.setattr(offloaded.copies, "poll", fail)
        assert_answered(offloaded, prompts, answers)
        run(until(offloaded.settled, "jobs without results have failed"))
    assert offloaded.stats.load.failed > 0
    assert_nothing_left(offloaded)


def test_refused_jobs_end_when_waiting_for_them_raises_once(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = make_offloaded(**SMALL)
    plain, raised = GatedCopies.wait, []

    def wait(self: GatedCopies, job_ids: Collection[int], timeout_s: float) -> bool:
        if raised.count(tuple(job_ids)) or len(raised) == MAX_ERRORS // 2:
            return plain(self, job_ids, timeout_s)
        raised.append(tuple(job_ids))
        raise RuntimeError("wait failed, says the test")

    monkeypatch.setattr(GatedCopies, "wait", wait)
    offloaded.copies.refuse.add(Direction.STORE)
    assert_answered(offloaded, prompts[:2], answers[:2])
    assert raised
    assert_nothing_left(offloaded)


class PartialTokenizer(ByT5Tokenizer):
    """Raises for one token, as the tokenizers in Python do for tokens of a padded vocabulary."""

    undecodable: int

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        if self.convert_ids_to_tokens(self.undecodable) in tokens:
            raise ValueError("no such token, says the test")
        return str(super().convert_tokens_to_string(tokens))


def test_other_requests_are_answered_when_one_token_has_no_text(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    offloaded = make_offloaded(**SMALL)
    engine, tokenizer = offloaded.engine, PartialTokenizer(extra_ids=0)
    tokenizer.undecodable = next(token for token in answers[1] if token not in answers[2])
    engine.model = replace(engine.model, tokenizer=CheckpointTokenizer(tokenizer))

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*[ask(engine, prompts[at], greedy(MAX_TOKENS)) for at in (1, 2, 1)])

    bad, good, worse = run(all_of_them())
    assert bad.reason is worse.reason is FinishReason.ERROR
    assert good.token_ids == answers[2]
    assert "no such token" in str(engine.last_error)
    assert_nothing_left(offloaded)


def fail_discards(patch: pytest.MonkeyPatch) -> list[float]:
    """Have every discard of the scheduler's state raise; the list returned grows with each."""
    calls: list[float] = []

    def abandon_all(self: OffloadScheduler, now_s: float, *args: object) -> list[Exception]:
        calls.append(now_s)
        raise RuntimeError("no discard, says the test")

    patch.setattr(OffloadScheduler, "abandon_all", abandon_all)
    return calls


def test_discards_after_the_clock_was_set_back_are_tried_again(
    make_offloaded: MakeOffloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    uptime_s = 50.0
    guard = OffloadGuard(make_offloaded(**SMALL).scheduler, 1, ErrorLog(), clock=lambda: uptime_s)
    discards = fail_discards(monkeypatch)
    guard.fail("a hook", ValueError("a test"), 10_000.0)
    for _ in range(3):
        uptime_s += 2 * DISCARD_EVERY_S
        guard.match("r", 0, 6_000.0)
    assert discards == [10_000.0, 6_000.0, 6_000.0, 6_000.0]


def test_seldom_errors_after_the_clock_was_set_back_are_no_burst(make_offloaded: MakeOffloaded) -> None:
    uptime_s = 50.0
    guard = OffloadGuard(make_offloaded(**SMALL).scheduler, 1, ErrorLog(), clock=lambda: uptime_s)
    for number in range(MAX_ERRORS):
        uptime_s += ERROR_WINDOW_S
        guard.fail("a hook", ValueError("a test"), 1e9 - number)
    assert guard.status.is_on


@pytest.mark.parametrize("is_disabled", [False, True])
def test_log_while_the_state_cannot_be_discarded_has_one_line(
    is_disabled: bool, make_offloaded: MakeOffloaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uptime_s = 50.0
    guard = OffloadGuard(make_offloaded(**SMALL).scheduler, 1, ErrorLog(), clock=lambda: uptime_s)
    discards = fail_discards(monkeypatch)
    if is_disabled:
        guard.disable("the pool is gone: restart, says the test")
    guard.fail("a hook", ValueError("a test"), 1.0)
    for number in range(5):
        uptime_s += DISCARD_EVERY_S
        guard.match("r", 0, float(number))
    assert len(discards) == 6
    assert caplog.text.count("POST /admin/v1/reset") == (0 if is_disabled else 1)


def test_load_after_a_failed_one_was_preempted_has_its_own_outcome(
    make_offloaded: MakeOffloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = make_offloaded(**SMALL)
    guard = offloaded.guard

    def commit(self: OffloadScheduler, *args: object) -> None:
        raise RuntimeError("no commit, says the test")

    with monkeypatch.context() as patch:
        patch.setattr(OffloadScheduler, "commit", commit)
        guard.commit("r", [[1]], 4, 1.0)
    guard.on_preempted("r", 2.0)
    assert not guard.has_open_work()
    monkeypatch.setattr(OffloadScheduler, "commit", lambda *_: None)
    guard.commit("r", [[1]], 4, 3.0)
    assert guard.on_transfers_finished([], 4.0) == []
    guard.on_preempted("r", 5.0)


def test_exception_without_a_readable_text_is_a_miss(
    make_offloaded: MakeOffloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "says the test")

    def fail(self: object, *args: object) -> None:
        raise Unreadable

    offloaded = make_offloaded(**SMALL)
    monkeypatch.setattr(OffloadScheduler, "match", fail)
    assert offloaded.guard.match("r", 0, 1.0) == Miss()
    assert str(offloaded.guard.status.last_error).startswith("match: Unreadable: ")
