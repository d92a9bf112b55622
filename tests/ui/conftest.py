"""Debian's Chromium, driven by Playwright, and services whose dashboard it opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.harness.debian import installed
from tests.harness.loop_service import ADMIN, READ
from tests.harness.service_process import Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a file; each opens its own pages. No other event loop can run while it is open."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = installed("chromium", "chromium")
    with api.sync_playwright() as playwright:
        api.expect.set_options(timeout=WAIT_MS)
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def prompt(conversation: int, num_tokens: int) -> list[int]:
    return [3 + (conversation * 17 + index * (conversation + 3)) % 240 for index in range(num_tokens)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with a full pool, a tier, evictions and requests that missed."""
    folder = tmp_path_factory.mktemp("served")
    tiers = f'[{{"type": "fs", "path": "{folder}/tier", "max_bytes": "64MiB"}}]'
    with serving(folder, pool_bytes="2MiB", device_blocks=64, tiers=tiers) as running:
        for number in range(12):
            running.complete(prompt(number % 6, 256), f"chat-{number}", max_tokens=1)
        running.complete(prompt(7, 128), "batch/<b>1</b>", max_tokens=1)
        running.settle()
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with an admin and a read token."""
    tokens = {"admin_token": ADMIN, "read_token": READ}
    with serving(tmp_path_factory.mktemp("guarded"), engine="none", pool_bytes="8MiB", **tokens) as running:
        yield running
