"""One service a module without tokens, one with; both real down to the bytes and the database file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.loop_service import ADMIN, READ, Service, start_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Without tokens: open to programs on this machine."""
    with start_service(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With an admin and a read token."""
    with start_service(tmp_path_factory.mktemp("guarded"), admin_token=ADMIN, read_token=READ) as running:
        yield running


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Service]:
    """A service of a test's own, for what leaves traces in counters."""
    with start_service(tmp_path) as running:
        yield running


@pytest.fixture
def client(fresh: Service) -> httpx.Client:
    """A client of `fresh`."""
    return fresh.shared_client


@pytest.fixture
def api(service: Service) -> httpx.Client:
    """A client of `service`."""
    return service.shared_client
