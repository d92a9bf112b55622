"""A bad start is refused with one clear message and exit code 2; a good one survives its database."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.process import environment, serving, wait_until


def refused(folder: Path, **settings: object) -> str:
    """What `kvferry serve` says when it refuses these settings."""
    ended = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve"],
        env=environment(folder, settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pool_byts": "1GiB"}, ["KVFERRY_POOL_BYTS", "POOL_BYTES"]),
        ({"pool_bytes": "many"}, ["KVFERRY_POOL_BYTES", "many"]),
        ({"pool_bytes": 1000}, ["POOL_BYTES=1000", "32,768"]),
        ({"host": "0.0.0.0"}, ["KVFERRY_HOST", "ADMIN_TOKEN"]),
        ({"model": "/nowhere/at/all"}, ["/nowhere/at/all"]),
        ({"store_mode": "lasy"}, ["KVFERRY_STORE_MODE", "lazy"]),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, settings: dict[str, object], words: list[str]) -> None:
    said = refused(tmp_path, **settings)
    for word in words:
        assert word in said


def test_a_pool_larger_than_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """vllm#42348, vllm#53042: more memory was configured than there is, and 1.92 times as much taken."""
    said = refused(tmp_path, pool_bytes="900TiB")
    numbers = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes \(", said)]
    assert len(numbers) == 2
    assert numbers[0] == 900 * 2**40
    assert 0 < numbers[1] < 2**40


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with serving(tmp_path / "first") as first:
        port = first.url.rsplit(":", 1)[1]
        said = refused(tmp_path / "second", port=port)
        assert f"PORT={port}" in said
        assert "device blocks" not in said


def test_serving_goes_on_while_the_database_is_locked_and_readyz_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, device_blocks=64, pool_bytes=32768 * 20) as served:
        locker = sqlite3.connect(tmp_path / "kvferry.db", isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        for number in range(6):
            served.complete([(number * 31 + i) % 240 + 3 for i in range(200)], max_tokens=2)
        wait_until(lambda: served.http.get("/readyz").status_code == 503, "not ready")
        assert "locked" in str(served.http.get("/readyz").json()["reasons"])
        put = served.http.put("/admin/v1/requests/r/policy", json={"store": False})
        assert put.status_code == 503
        assert served.http.get("/admin/v1/requests/r").status_code == 404
        locker.execute("ROLLBACK")
        locker.close()
        wait_until(lambda: served.http.get("/readyz").status_code == 200, "ready again")
        stats = served.settle()
        assert stats["evictions"]["total"] > 0
        wait_until(lambda: served.stats()["journal"]["queued"] == 0, "history is written")
        page = served.get("/admin/v1/evictions?limit=1000")
        assert len(page["items"]) + stats["journal"]["dropped"] == stats["evictions"]["total"]
        rows = sqlite3.connect(tmp_path / "kvferry.db").execute("select count(*) from slots").fetchone()[0]
        assert rows == stats["pool"]["ready"]


def test_without_an_engine_the_admin_api_serves_alone(tmp_path: Path) -> None:
    with serving(tmp_path, engine="none", pool_bytes="16MiB") as served:
        assert served.stats()["engine"]["name"] == "none"
        assert served.http.post("/admin/v1/reset", json={}).json()["epoch"] == 1
        assert served.http.post("/v1/completions", json={}).status_code == 404
        assert served.stop() == 0
