"""Commands' event loop under signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from kvferry.app.cli.console import run_async


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    """A process in the background may have been started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class SignallingPolicy(asyncio.DefaultEventLoopPolicy):
    """Sends Ctrl-C to this process while a loop is made, and keeps the loops."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)
        self.loops.append(super().new_event_loop())
        return self.loops[-1]


def test_ctrl_c_while_the_loop_is_made_leaves_no_half_loop() -> None:
    policy = SignallingPolicy()
    started: list[str] = []

    async def work() -> None:
        started.append("work")

    asyncio.set_event_loop_policy(policy)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_async(work)
    finally:
        asyncio.set_event_loop_policy(None)
    (loop,) = policy.loops
    assert loop.is_closed()
    assert started == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_cancels_what_runs() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(600)
        finally:
            cleaned.append("work")

    with pytest.raises(KeyboardInterrupt):
        run_async(work)
    assert cleaned == ["work"]


def test_ctrl_c_at_the_end_is_not_lost() -> None:
    async def work() -> int:
        signal.raise_signal(signal.SIGINT)
        return 1

    with pytest.raises(KeyboardInterrupt):
        run_async(work)


def test_the_result_and_the_cancellation_of_others_come_back() -> None:
    async def work() -> int:
        return 1

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert run_async(work) == 1
    with pytest.raises(asyncio.CancelledError):
        run_async(cancelled)
