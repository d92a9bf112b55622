"""Tokens in files that change while the service runs: one valid beside its successor, then gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse

from tests.harness.loop_service import name_of_token
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until

OLD, NEW, READ = "old-admin-token", "new-admin-token", "read-token"
STATS = "/admin/v1/stats"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The files of both tokens, as a volume of Kubernetes has them: links to files in a folder that is a link."""
    (tmp_path / "first").mkdir()
    (tmp_path / "data").symlink_to("first")
    for name, token in (("admin", OLD), ("read", READ)):
        (tmp_path / "first" / name).write_text(token + "\n")
        (tmp_path / name).symlink_to(f"data/{name}")
    return {name: tmp_path / name for name in ("admin", "read")}


@pytest.fixture
def served(tmp_path: Path, files: dict[str, Path]) -> Iterator[Served]:
    given = {f"{name}_token_file": path for name, path in files.items()}
    # Without a token of its own the client sends none; each call states one.
    with serving(tmp_path / "state", engine="none", is_up=lambda answer: answer.status_code == 200, **given) as served:
        yield served


def status(served: Served, token: str) -> int:
    return served.http.get(STATS, headers=bearer(token)).status_code


def degraded(served: Served) -> list[str]:
    return list(served.http.get("/readyz").json()["degraded"])


def test_tokens_when_their_file_changes_are_those_of_the_file(
    served: Served, files: dict[str, Path], tmp_path: Path
) -> None:
    assert (status(served, OLD), status(served, NEW), status(served, READ)) == (200, 401, 200)
    files["admin"].write_text(f"{OLD}\n{NEW}\n")
    wait_until(lambda: status(served, NEW) == 200, "the new token is valid")
    assert status(served, OLD) == 200
    # Kubernetes has a folder with the new files take the place of the old one.
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "admin").write_text(NEW)
    (tmp_path / "second" / "read").write_text(READ)
    (tmp_path / "next").symlink_to("second")
    (tmp_path / "next").replace(tmp_path / "data")
    wait_until(lambda: status(served, OLD) == 401, "the old token is not valid any more")
    assert (status(served, NEW), status(served, READ), degraded(served)) == (200, 200, [])


def test_stream_of_a_removed_token_ends_and_that_of_another_goes_on(served: Served, files: dict[str, Path]) -> None:
    files["admin"].write_text(f"{OLD}\n{NEW}")
    wait_until(lambda: status(served, NEW) == 200, "the new token is valid")
    with (
        httpx.Client(base_url=served.url, headers=bearer(OLD)) as old,
        httpx.Client(base_url=served.url, headers=bearer(NEW)) as new,
        connect_sse(old, "GET", f"{STATS}/stream?interval_s=60") as ending,
        connect_sse(new, "GET", f"{STATS}/stream?interval_s=0.2") as lasting,
        connect_sse(old, "GET", "/admin/v1/events") as events,
    ):
        others = lasting.iter_sse()
        next(others)
        files["admin"].write_text(NEW)
        assert len(list(ending.iter_sse())) == 1
        list(events.iter_sse())
        assert status(served, OLD) == 401
        assert [next(others) for _ in range(3)]


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", "one\ntwo\nthree", "same\nsame", "with a blank", READ, f"{NEW}\n{READ}", "\x00", "ä", None],
    ids=["empty", "blank", "three", "twice", "blanks", "read", "both", "nul", "latin", "missing"],
)
def test_tokens_while_their_file_is_invalid_are_the_last_ones(
    content: str | None, served: Served, files: dict[str, Path]
) -> None:
    if content is None:
        files["admin"].unlink()
    else:
        files["admin"].write_text(content)
    wait_until(lambda: bool(degraded(served)), "degraded says so")
    (text,) = degraded(served)
    assert text.startswith("tokens in use are those read before: KVFERRY_")
    assert not any(secret in text + served.log() for secret in (OLD, NEW, READ, "three", "with a blank"))
    assert (status(served, OLD), status(served, READ)) == (200, 200)
    files["admin"].write_text(NEW)
    wait_until(lambda: not degraded(served), "the file is valid again")
    assert (status(served, OLD), status(served, NEW)) == (401, 200)


def test_audit_names_tokens_by_their_digest(served: Served, files: dict[str, Path]) -> None:
    files["admin"].write_text(f"{OLD}\n{NEW}")
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
    with serving(tmp_path, engine="none", admin_token=f"{OLD},{NEW}", is_up=lambda a: a.status_code == 200) as served:
        tokens = (OLD, NEW, f"{OLD},{NEW}", READ)
        assert [status(served, token) for token in tokens] == [200, 200, 401, 401]
        listed = served.http.get("/admin/v1/config", headers=bearer(OLD)).text
        assert OLD not in listed
        assert NEW not in listed
