"""`POST /admin/v1/lookup`: how much of a prompt the pool holds, for routers that choose an engine by it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.app.api.routes.lookup import MAX_QUERIES, MAX_WAITING
from tests.harness.loop_engine import BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import Service, errors_of, start_service
from tests.harness.waiting import DEADLINE_S

LOOKUP = "/admin/v1/lookup"


def look_up(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post(LOOKUP, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_prompt_that_was_served_is_found_by_tokens_and_by_hashes(fresh: Service) -> None:
    served = fresh.engine.answer(LoopRequest("a", 100))
    fresh.settle()
    longer = LoopRequest("b", 200)
    assert longer.tokens[:100] == served.tokens[:100]
    held = {"device": 96, "pool": 96, "tiers": {}, "anywhere": 96}
    with fresh.client() as client:
        before = client.get("/admin/v1/stats").json()
        assert look_up(client, token_ids=longer.tokens) == {"num_tokens": 200, **held}
        hashes = [block_hash.hex() for block_hash in longer.block_hashes]
        assert look_up(client, hashes=hashes) == {"num_tokens": 200 // BLOCK_TOKENS * BLOCK_TOKENS, **held}
        assert look_up(client, token_ids=[1, 2, 3])["anywhere"] == 0
        after = client.get("/admin/v1/stats").json()
        audit = client.get("/admin/v1/audit").json()["items"]
    assert {name: after[name] for name in ("load", "requests", "prompt_tokens")} == {
        name: before[name] for name in ("load", "requests", "prompt_tokens")
    }
    assert audit == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"token_ids": [1], "hashes": ["00"]}, "body"),
        ({"hashes": ["00"], "cache_salt": "s"}, "body"),
        ({"hashes": ["00"], "lora": "l"}, "body"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"token_ids": [1 << 31]}, "token_ids.0"),
        ({"token_ids": [1.5]}, "token_ids.0"),
        ({"token_ids": [0] * 131_073}, "token_ids"),
        ({"hashes": ["0g"]}, "hashes.0"),
        ({"hashes": ["000"]}, "hashes.0"),
        ({"hashes": ["00" * 129]}, "hashes.0"),
        ({"hashes": ["00"] * 8193}, "hashes"),
        ({"token_ids": [1], "tokens": [1]}, "tokens"),
    ],
)
def test_lookup_with_a_wrong_body_names_the_field(api: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = api.post(LOOKUP, json=body)
    assert errors_of(answer) == [field]


def test_lookups_beyond_those_that_may_wait_are_429(fresh: Service) -> None:
    num_kept, num_refused = MAX_QUERIES + MAX_WAITING, 6
    body = {"hashes": ["00"]}
    with fresh.client() as client, ThreadPoolExecutor(num_kept + num_refused) as pool:
        with fresh.engine.manager.lock:
            calls = [pool.submit(client.post, LOOKUP, json=body) for _ in range(num_kept + num_refused)]
            refused = [call.result() for call in islice(as_completed(calls), num_refused)]
        assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(429, "1")}
        assert sorted(call.result().status_code for call in calls) == [200] * num_kept + [429] * num_refused
        assert look_up(client, **body)["pool"] == 0


@pytest.mark.parametrize("body", [{"token_ids": [(1 << 31) - 1] * 131_072}, {"hashes": ["ab" * 128] * 8192}])
def test_lookup_of_the_longest_prompt_is_answered(client: httpx.Client, body: dict[str, Any]) -> None:
    assert look_up(client, **body)["anywhere"] == 0


def test_lookup_without_an_engine_takes_hashes_only(tmp_path: Path) -> None:
    with start_service(tmp_path, hashes_prompts=False) as service, service.client() as client:
        assert look_up(client, hashes=["00"])["pool"] == 0
        refused = client.post(LOOKUP, json={"token_ids": [1]})
        assert (refused.status_code, "hashes" in refused.json()["detail"]) == (409, True)


def test_lookup_with_an_unknown_adapter_names_it(client: httpx.Client) -> None:
    refused = client.post(LOOKUP, json={"token_ids": [1], "lora": "other"})
    assert (refused.status_code, "lora=other" in refused.json()["detail"]) == (404, True)


def test_lookup_is_open_to_the_read_token_and_to_nobody_else(tmp_path: Path) -> None:
    admin, read = "admin-token-of-the-test", "read-token-of-the-test"
    with start_service(tmp_path, admin_token=admin, read_token=read) as service:
        for token, status in ((admin, 200), (read, 200), ("other-token-of-the-test", 401), (None, 401)):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            answer = httpx.post(service.url + LOOKUP, json={"hashes": ["00"]}, headers=headers, timeout=DEADLINE_S)
            assert answer.status_code == status
        headers = {"Authorization": f"Bearer {read}"}
        assert httpx.post(f"{service.url}/admin/v1/reset", headers=headers, timeout=DEADLINE_S).status_code == 403
        assert httpx.delete(service.url + LOOKUP, headers=headers, timeout=DEADLINE_S).status_code in (403, 405)
