"""Commands' event loop under signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from kvferry.app.cli.console import INTERRUPTS, run_async


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    """A process in the background may have been started with a signal ignored."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in INTERRUPTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", INTERRUPTS)
def test_signal_cancels_what_runs(number: signal.Signals) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(600)
        finally:
            cleaned.append("work")

    with pytest.raises(KeyboardInterrupt):
        run_async(work)
    assert cleaned == ["work"]
