"""Tokens in files that change while the service runs: one valid beside its successor, then gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse

from tests.harness.loop_service import name_of_token, start_service
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until

OLD, NEW, READ = "old-admin-token", "new-admin-token", "read-token"
STATS = "/admin/v1/stats"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A service, and the folder with the files `admin` and `read` of its tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    replace_files(folder, "first", OLD)
    given = {f"{name}_token_file": folder / "data" / name for name in ("admin", "read")}
    # Without a token of its own the client sends none; each call states one.
    with serving(folder / "state", engine="none", is_up=lambda answer: answer.status_code == 200, **given) as served:
        yield served, folder


def replace_files(folder: Path, name: str, admin: str) -> None:
    """Have a folder with new files take the place of the old one, as Kubernetes does."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "admin").write_text(admin + "\n")
    (folder / name / "read").write_text(READ)
    (folder / "next").symlink_to(name)
    (folder / "next").replace(folder / "data")


@pytest.fixture
def folder(running: tuple[Served, Path]) -> Path:
    """The folder of the files, with the tokens OLD and READ in use."""
    served, folder = running
    replace_files(folder, "first", OLD)
    wait_until(lambda: (status(served, OLD), status(served, NEW)) == (200, 401), "the tokens of the files")
    return folder


@pytest.fixture
def served(running: tuple[Served, Path]) -> Served:
    return running[0]


def status(served: Served, token: str) -> int:
    return served.http.get(STATS, headers=bearer(token)).status_code


def degraded(served: Served) -> list[str]:
    return list(served.http.get("/readyz").json()["degraded"])


def test_tokens_when_their_file_changes_are_those_of_the_file(served: Served, folder: Path) -> None:
    assert status(served, READ) == 200
    (folder / "data" / "admin").write_text(f"{OLD}\n{NEW}\n")
    wait_until(lambda: status(served, NEW) == 200, "the new token is valid")
    assert status(served, OLD) == 200
    replace_files(folder, "second", NEW)
    wait_until(lambda: status(served, OLD) == 401, "the old token is not valid any more")
    assert (status(served, NEW), status(served, READ), degraded(served)) == (200, 200, [])


def test_stream_of_a_removed_token_ends_and_that_of_another_goes_on(served: Served, folder: Path) -> None:
    (folder / "data" / "admin").write_text(f"{OLD}\n{NEW}")
    wait_until(lambda: status(served, NEW) == 200, "the new token is valid")
    with (
        httpx.Client(base_url=served.url, headers=bearer(OLD), timeout=DEADLINE_S) as old,
        httpx.Client(base_url=served.url, headers=bearer(NEW), timeout=DEADLINE_S) as new,
        connect_sse(old, "GET", f"{STATS}/stream?interval_s=60") as ending,
        connect_sse(new, "GET", f"{STATS}/stream?interval_s=0.2") as lasting,
        connect_sse(old, "GET", "/admin/v1/events") as events,
    ):
        others = lasting.iter_sse()
        next(others)
        (folder / "data" / "admin").write_text(NEW)
        assert len(list(ending.iter_sse())) == 1
        list(events.iter_sse())
        assert status(served, OLD) == 401
        assert [next(others) for _ in range(3)]


def test_tokens_while_their_file_is_invalid_are_the_last_ones(served: Served, folder: Path) -> None:
    (folder / "data" / "admin").write_text(f"{NEW}\n{READ}")
    wait_until(lambda: bool(degraded(served)), "degraded says so")
    (text,) = degraded(served)
    assert text.startswith("tokens in use are those read before: KVFERRY_")
    assert not any(secret in text + served.log() for secret in (OLD, NEW, READ))
    assert (status(served, OLD), status(served, READ)) == (200, 200)
    (folder / "data" / "admin").write_text(NEW)
    wait_until(lambda: not degraded(served), "the file is valid again")
    assert (status(served, OLD), status(served, NEW)) == (401, 200)


def test_audit_names_tokens_by_their_digest(served: Served, folder: Path) -> None:
    (folder / "data" / "admin").write_text(f"{OLD}\n{NEW}")
    wait_until(lambda: status(served, NEW) == 200, "the new token is valid")
    for token in (OLD, NEW, READ):
        served.http.post("/admin/v1/reset", json={}, headers=bearer(token))
    rows = served.http.get("/admin/v1/audit", headers=bearer(READ)).json()["items"]
    assert [row["token"] for row in rows] == [
        name_of_token(READ, "read"),
        name_of_token(NEW, "admin"),
        name_of_token(OLD, "admin"),
    ]


def test_token_setting_with_two_tokens_accepts_both_and_no_third(tmp_path: Path) -> None:
    with start_service(tmp_path, admin_token=f"{OLD},{NEW}") as service, service.client() as http:
        answers = [http.get(STATS, headers=bearer(token)) for token in (OLD, NEW, f"{OLD},{NEW}", READ)]
        assert [answer.status_code for answer in answers] == [200, 200, 401, 401]
        listed = http.get("/admin/v1/config", headers=bearer(OLD)).text
        assert OLD not in listed
        assert NEW not in listed
