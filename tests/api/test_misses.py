"""Why a prompt had to be computed: every cause as a client sees it, for one request and in sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.app.cli.requests import explain
from kvferry.core.cost_model import MIN_SAMPLES
from kvferry.core.keys import make_keys
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.transfers import Direction
from tests.harness.loop_engine import BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import Service, start_service

BLOCKS = 10
TOKENS = BLOCKS * BLOCK_TOKENS + 1
"""The last token is computed in any case."""


def ask(service: Service, name: str, num_tokens: int = TOKENS, **more: Any) -> LoopRequest:
    request = service.engine.answer(LoopRequest(name, num_tokens, seed=more.pop("seed", 1), **more))
    service.settle()
    return request


def missed(client: httpx.Client, name: str) -> dict[str, int]:
    """In blocks, by cause; the tail is left out. It has to add up, for all requests together as well."""
    shown = client.get(f"/admin/v1/requests/{name}").json()
    total = client.get("/admin/v1/stats").json()
    each = client.get("/admin/v1/requests?limit=1000").json()["items"]
    assert sum(flat(shown).values()) == shown["prompt_tokens"]["recomputed"]
    assert sum(flat(total).values()) == total["prompt_tokens"]["recomputed"]
    for cause, tokens in flat(total).items():
        assert tokens == sum(flat(one).get(cause, 0) for one in each)
    metrics = client.get("/metrics").text
    blocks = {}
    for cause, tokens in flat(shown).items():
        if tokens and cause != "tail":
            assert f'kvferry_missed_prompt_tokens_total{{cause="{cause}"}}' in metrics
            assert tokens % BLOCK_TOKENS == 0
            blocks[cause] = tokens // BLOCK_TOKENS
    assert flat(shown)["tail"] >= 1
    assert (shown["evicted_between"] is not None) == any(cause.startswith("evicted") for cause in blocks)
    return blocks


def flat(shown: dict[str, Any]) -> dict[str, int]:
    causes: dict[str, int] = dict(shown["missed_tokens"]["causes"])
    for kind in ("evicted", "not_stored"):
        causes |= {f"{kind}:{cause}": tokens for cause, tokens in shown["missed_tokens"][kind].items()}
    return causes


def test_miss_of_blocks_never_stored_is_new(fresh: Service, client: httpx.Client) -> None:
    ask(fresh, "first")
    assert missed(client, "first") == {"new": BLOCKS}
    ask(fresh, "second")
    assert missed(client, "second") == {}


@pytest.mark.parametrize(("sent", "cause"), [({"store": False}, "disabled"), ({"max_offload_tokens": 0}, "token_cap")])
def test_miss_of_blocks_excluded_by_policy_names_its_field(
    fresh: Service, client: httpx.Client, sent: dict[str, Any], cause: str
) -> None:
    ask(fresh, "first", kv_transfer_params=sent)
    ask(fresh, "second")
    assert missed(client, "second") == {f"not_stored:{cause}": BLOCKS}


def test_miss_of_an_earlier_answer_is_not_stored_prompt_only(fresh: Service, client: httpx.Client) -> None:
    ask(fresh, "first", 4 * BLOCK_TOKENS, num_output_tokens=6 * BLOCK_TOKENS)
    ask(fresh, "second")
    assert missed(client, "second") == {"not_stored:prompt_only": 6}


def test_miss_when_admission_or_a_store_failed_names_it(fresh: Service, client: httpx.Client) -> None:
    client.patch("/admin/v1/config", json={"store_threshold": 3}).raise_for_status()
    ask(fresh, "first")
    ask(fresh, "second")
    assert missed(client, "second") == {"not_stored:admission": BLOCKS}
    client.patch("/admin/v1/config", json={"store_threshold": 1}).raise_for_status()
    fresh.engine.failing = Direction.STORE
    ask(fresh, "other", seed=2)
    fresh.engine.failing = None
    ask(fresh, "other-again", seed=2)
    assert missed(client, "other-again") == {"not_stored:failed": BLOCKS}


def test_miss_when_the_pool_is_full_or_pinned_names_it(tmp_path: Path) -> None:
    with start_service(tmp_path, num_slots=8) as small, small.client() as client:
        ask(small, "first")
        assert missed(client, "first") == {"new": BLOCKS}
        ask(small, "second")
        assert missed(client, "second") == {"pin_limit": 4, "not_stored:no_space": BLOCKS - 8}


def test_miss_of_evicted_blocks_has_reason_and_time_and_a_gap_behind(fresh: Service, client: httpx.Client) -> None:
    first = ask(fresh, "first")
    hashes = [key.hex() for key in make_keys(first.block_hashes, 0)]
    client.delete(f"/admin/v1/blocks/{hashes[7]}").raise_for_status()
    ask(fresh, "no-store", kv_transfer_params={"store": False})
    assert missed(client, "no-store") == {"evicted:operator": 1, "gap": 2}
    # Of these seeds, no two ghosts that are asked for fall on one place.
    for number in range(3):
        ask(fresh, f"other{number}", 100 * BLOCK_TOKENS, seed=20 + number)
    ask(fresh, "second", kv_transfer_params={"store": False})
    assert missed(client, "second") == {"evicted:capacity": 9, "evicted:operator": 1}
    client.post("/admin/v1/reset", json={"match": {"request": "other2"}}).raise_for_status()
    ask(fresh, "other2-again", 100 * BLOCK_TOKENS, seed=22)
    assert missed(client, "other2-again") == {"evicted:reset": 99}
    fresh.settle_history()
    rows = client.get("/admin/v1/evictions?request=first&limit=1000").json()["items"]
    times = sorted(row["time"] for row in rows)
    shown = client.get("/admin/v1/requests/second").json()["evicted_between"]
    assert shown[0] <= times[0]
    assert times[-1] < shown[1]
    window = {"since": shown[0], "until": shown[1], "request": "first"}
    assert len(client.get("/admin/v1/evictions", params=window).json()["items"]) == BLOCKS


def test_miss_when_a_load_failed_or_was_not_tried_names_it(fresh: Service, client: httpx.Client) -> None:
    ask(fresh, "first")
    ask(fresh, "not-allowed", kv_transfer_params={"load": False, "store": False})
    assert missed(client, "not-allowed") == {"load_disabled": BLOCKS}
    fresh.engine.failing = Direction.LOAD
    ask(fresh, "failed", kv_transfer_params={"store": False})
    fresh.engine.failing = None
    assert missed(client, "failed") == {"load_failed": BLOCKS}
    ask(fresh, "after")
    assert missed(client, "after") == {"evicted:load_failed": BLOCKS}
    cost_model = fresh.engine.offload.cost_model
    for _ in range(MIN_SAMPLES):
        cost_model.bytes_rate.observe(1, 1.0)
        cost_model.tokens_rate.observe(1_000_000, 1.0)
    ask(fresh, "slower")
    assert missed(client, "slower") == {"declined": BLOCKS}


def test_request_with_an_error_of_its_own_names_it(
    fresh: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(fresh, "first")
    plain = OffloadScheduler.match

    def match(self: OffloadScheduler, request_id: str, *args: Any) -> object:
        self.exclude(request_id, "match", KeyError("no such key"))
        return plain(self, request_id, *args)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadScheduler, "match", match)
        ask(fresh, "broken")
    assert missed(client, "broken") == {"error": BLOCKS}
    shown = client.get("/admin/v1/requests/broken").json()
    assert shown["error"] == "match: KeyError"
    assert next(explain(shown)).startswith("An unexpected error (match: KeyError) kept it from offloading")
    ask(fresh, "second")
    assert missed(client, "second") == {}
    stats = client.get("/admin/v1/stats").json()
    assert (stats["requests"]["excluded"], stats["offloading"]["is_on"]) == (1, True)
    assert "kvferry_requests_excluded_total 1.0" in client.get("/metrics").text
    assert client.get("/readyz").status_code == 200
