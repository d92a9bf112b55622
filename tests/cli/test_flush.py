"""`kvferry tiers flush`: what is printed, selection, refusals, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run, command_environment
from tests.harness.commands import start_command
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, attach_tier, start_service
from tests.harness.toy_tiers import ToyTier
from tests.harness.waiting import DEADLINE_S, wait_until


@pytest.fixture
def flushable(tmp_path: Path) -> Iterator[tuple[Service, ToyTier]]:
    """A service whose pool has 16 blocks, of two tenants, and its tier, which has none."""
    with start_service(tmp_path / "state") as service:
        for number in range(2):
            service.engine.answer(LoopRequest(f"r{number}", 128, seed=number, tenant=f"{number}" * 16))
        service.settle()
        yield service, attach_tier(service)


def test_flush_prints_what_it_copied(flushable: tuple[Service, ToyTier], run: Run) -> None:
    service, tier = flushable
    one = run("tiers", "flush", "disk", "--tenant", "1*", "--json", URL=service.url)
    assert one.code == 0, one.err
    assert (one.json["name"], one.json["state"], one.json["tenant"]) == ("disk", "done", "1*")
    assert 0 < one.json["stored_blocks"] == one.json["num_blocks"] == len(tier.blocks)
    done = run("tiers", "flush", "disk", URL=service.url)
    assert done.code == 0
    assert re.search(rf"^stored blocks +{len(tier.blocks)} *$", done.out, re.MULTILINE)


def test_flush_that_is_refused_or_fails_says_why(flushable: tuple[Service, ToyTier], run: Run) -> None:
    service, tier = flushable
    unknown = run("tiers", "flush", "none", URL=service.url)
    assert (unknown.code, "no tier called none" in unknown.err) == (1, True)
    tier.raises = {"store"}
    failed = run("tiers", "flush", "disk", URL=service.url)
    assert failed.code == 1
    assert re.search(r"^state +failed *$", failed.out, re.MULTILINE)
    assert "store failed" in failed.out


def test_ctrl_c_ends_the_flush(flushable: tuple[Service, ToyTier], tmp_path: Path) -> None:
    service, tier = flushable
    tier.due = lambda number: False
    with (tmp_path / "out").open("w") as out:
        words = ["tiers", "flush", "disk", "--json"]
        command = start_command(words, command_environment(URL=service.url), tmp_path, out, out)

        def is_begun() -> bool:
            flush = service.engine.offload.tiers.flushes.latest("disk")
            return flush is not None and flush.num_blocks > 0

        wait_until(is_begun, "the flush has begun")
        command.send_signal(signal.SIGINT)
        assert command.wait(DEADLINE_S) == 1
    assert json.loads((tmp_path / "out").read_text())["state"] == "canceled"
