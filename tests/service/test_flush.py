"""A tier that one service has flushed its pool to: another one that has this tier starts warm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.identities import check_identities
from tests.harness.redis_server import redis_server
from tests.harness.service_process import Served, serving, wait_until
from tests.service.test_answers import BLOCK, OUTPUT, turn_over
from tests.service.test_tiers import prompt_of

SETTINGS = {"dtype": "float64", "device_blocks": 90, "pool_bytes": "32MiB", "load_decision": "always"}
NUM_BLOCKS = 15
"""Whole blocks of a prompt."""


def fill(served: Served, count: int = 3) -> list[tuple[list[int], list[int]]]:
    """Prompts and their answers; the pool has all of their blocks afterwards, which have left the device."""
    asked = [prompt_of(number) for number in range(count)]
    answers = [served.tokens(one, max_tokens=OUTPUT) for one in asked]
    turn_over(served)
    served.settle()
    return list(zip(asked, answers, strict=True))


def flush(served: Served, name: str, body: dict[str, Any] | None = None) -> Any:
    """Flush a tier, and return the flush once it has ended."""
    begun = served.http.post(f"/admin/v1/tiers/{name}/flush", json=body or {})
    assert begun.status_code == 202, begun.text

    def current() -> Any:
        return served.get(f"/admin/v1/tiers/{name}")["flush"]

    wait_until(lambda: current()["state"] != "running", "the end of the flush")
    assert current()["num_blocks"] == begun.json()["num_blocks"]
    return current()


@contextmanager
def medium(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The definition of a tier that several services can have, below the folder that a service may use."""
    with ExitStack() as stack:
        if kind == "redis":
            yield {"type": "redis", "url": stack.enter_context(redis_server(folder / "redis-data")).url}
        else:
            path = folder / "a" / "tiers" / "shared"
            yield {"type": "fs", "path": str(path), "max_bytes": "1GiB", "shared": True}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("fs", "lazy"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("fs", "eager"), ("redis", "eager"), ("redis", "lazy"))
        ),
    ],
)
def test_service_with_a_flushed_tier_hits_at_its_first_prompts(tmp_path: Path, kind: str, mode: str) -> None:
    (tmp_path / "redis-data").mkdir()
    (tmp_path / "a" / "tiers").mkdir(parents=True)
    with medium(kind, tmp_path) as tier:
        with serving(tmp_path / "a", store_mode=mode, **SETTINGS) as first:
            asked = fill(first)
            answer = first.http.put("/admin/v1/tiers/warm", json=tier)
            assert answer.status_code == 201, answer.text
            flushed = flush(first, "warm")
            assert flushed["state"] == "done", flushed
            assert flushed["stored_blocks"] == flushed["num_blocks"] >= 3 * NUM_BLOCKS
            assert flushed["left_blocks"] == 0
            assert first.stats()["tiers"]["warm"]["stored"] == flushed["num_blocks"]
            check_identities(first.settle())
            assert "Traceback" not in first.log()
        given = SETTINGS | {"tiers": json.dumps([tier | {"name": "warm"}])}
        with serving(tmp_path / "b", **given) as second:
            wait_until(lambda: not second.get("/readyz")["degraded"], "the tier is measured")
            assert second.http.patch("/admin/v1/policy", json={"tier_wait": "wait_complete"}).status_code == 200
            for index, (prompt, answer) in enumerate(asked):
                found = second.complete(prompt, f"p{index}", max_tokens=OUTPUT)
                assert found["choices"][0]["token_ids"] == answer
            stats = second.settle()
            assert stats["prompt_tokens"]["tier_hit"] == {"warm": 3 * NUM_BLOCKS * BLOCK}
            check_identities(stats)


@pytest.mark.long
def test_recovered_pool_is_verified_and_flushed(tmp_path: Path) -> None:
    given = SETTINGS | {"pool_kind": "file", "pool_path": tmp_path / "pool", "engine_name": "kept"}
    (tmp_path / "a" / "tiers").mkdir(parents=True)
    with serving(tmp_path / "a", **given) as first:
        fill(first)
        assert first.stop() == 0
    with serving(tmp_path / "a", **given) as again:
        num_unverified = again.stats()["pool"]["unverified"]
        assert num_unverified >= 3 * NUM_BLOCKS
        folder = {"type": "fs", "path": str(tmp_path / "a" / "tiers" / "disk"), "max_bytes": "1GiB"}
        assert again.http.put("/admin/v1/tiers/disk", json=folder).status_code == 201
        flushed = flush(again, "disk")
        assert (flushed["state"], flushed["stored_blocks"], flushed["left_blocks"]) == ("done", num_unverified, 0)
        assert again.stats()["pool"]["unverified"] == 0
