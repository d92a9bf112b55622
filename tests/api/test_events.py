from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse
from hypothesis import given
from hypothesis import strategies as st

from kvferry.app.telemetry import events as event_feed
from kvferry.app.telemetry.events import EventFeed, EventType
from kvferry.core.keys import make_keys
from kvferry.core.pool.events import RegretBatch
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, errors_of

EVENTS = "/admin/v1/events"


class Watcher:
    """Reads a stream of events."""

    def __init__(self, events: Iterator[ServerSentEvent]) -> None:
        self._events = events
        self.last_id = ""

    def next(self) -> dict[str, Any]:
        event = next(self._events)
        data: dict[str, Any] = json.loads(event.data)
        assert event.event == data["type"]
        assert data.pop("time").endswith("Z")
        self.last_id = event.id
        return data

    def until(self, type_: str) -> dict[str, Any]:
        """The next event of this type."""
        while (event := self.next())["type"] != type_:
            continue
        return event


@contextmanager
def watching(service: Service, last_id: str | None = None, **params: Any) -> Iterator[Watcher]:
    """A stream that is open: what happens from now on comes out of it."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    with (
        service.client() as client,
        connect_sse(client, "GET", EVENTS, params=params, headers=headers) as source,
    ):
        assert source.response.status_code == 200
        watcher = Watcher(source.iter_sse())
        assert watcher.next() == {"type": "open"}
        yield watcher


def test_events_of_the_pool_are_sent_in_order(fresh: Service, client: httpx.Client) -> None:
    request = LoopRequest("one", 64, seed=1, num_output_tokens=8, tenant="a1b2", lora="sql", session="s")
    hashes = [key.hex() for key in make_keys(request.block_hashes[:4], 0)]
    with watching(fresh) as watcher:
        fresh.engine.answer(request)
        whom = {"request": "one", "tenant": "a1b2", "lora": "sql", "session": "s"}
        seen = sorted((watcher.next(), watcher.next()), key=lambda event: event["type"])
        tokens = {"total": 64, "device_hit": 0, "host_hit": 0, "tier_hit": {}, "recomputed": 64}
        counts = {"num_prompt_tokens": 64, "num_output_tokens": 8}
        assert seen == [
            {"type": "finished", **whom, **counts, "prompt_tokens": tokens},
            {"type": "stored", **whom, "blocks": 4, "hashes": hashes},
        ]
        client.delete(f"/admin/v1/blocks/{hashes[3]}")
        why = {"reason": "operator", "policy": "lru", "needed_by": None}
        assert watcher.next() == {"type": "evicted", **why, "blocks": 1, "hashes": hashes[3:]}
        fresh.engine.answer(LoopRequest("two", 80, seed=1, tenant="a1b2", lora="sql"))
        assert watcher.until("regretted") == {"type": "regretted", "blocks": 1, "hashes": hashes[3:]}
        assert watcher.until("finished")["prompt_tokens"]["host_hit"] == 48
        fresh.settle()
        client.post("/admin/v1/reset")
        assert watcher.until("reset") == {"type": "reset", "blocks": 5}


def test_evicted_event_names_the_request_that_needed_space(fresh: Service) -> None:
    fresh.engine.answer(LoopRequest("victim", 320, seed=1))
    fresh.settle()
    with watching(fresh, type="evicted") as watcher:
        for number in range(14):
            fresh.engine.answer(LoopRequest(f"r{number}", 320, seed=100 + number))
        evicted = watcher.next()
    assert (evicted["reason"], evicted["needed_by"]) == ("capacity", "r11")
    assert evicted["blocks"] == len(evicted["hashes"]) == 4


def test_events_of_operator_changes_are_sent(fresh: Service, client: httpx.Client) -> None:
    rule = {"name": "batch", "order": 1, "match": {"cache_salt": "secret-salt"}, "policy": {"max_offload_tokens": 5}}
    with watching(fresh) as watcher:
        client.patch("/admin/v1/policy", json={"store": True, "load": None, "max_offload_tokens": "unlimited"})
        assert watcher.next() == {
            "type": "policy",
            "set": {"store": True, "max_offload_tokens": "unlimited"},
            "removed": ["load"],
        }
        ends = client.put("/admin/v1/requests/r1/policy", json={"store": False}).json()["override"]["expires_at"]
        override = {"change": "set", "request": "r1", "policy": {"store": False}, "expires_at": ends}
        assert watcher.next() == {"type": "override", **override}
        client.delete("/admin/v1/requests/r1/policy")
        assert watcher.next() == {"type": "override", "change": "removed", "request": "r1"}
        shown = client.post("/admin/v1/rules", json=rule).json()
        assert watcher.next() == {"type": "rule", "change": "set", "rule": shown}
        client.delete("/admin/v1/rules/batch")
        assert watcher.next() == {"type": "rule", "change": "removed", "rule": {"name": "batch"}}
        client.patch("/admin/v1/config", json={"max_pinned_fraction": 0.5, "log_level": None})
        assert watcher.next() == {"type": "config", "settings": ["log_level", "max_pinned_fraction"]}


def test_events_when_filtered_by_type_are_those_only(fresh: Service, client: httpx.Client) -> None:
    with watching(fresh, type=["rule", "reset"]) as watcher:
        fresh.engine.answer(LoopRequest("one", 64, seed=1))
        fresh.settle()
        client.post("/admin/v1/reset")
        client.put("/admin/v1/rules/one", json={})
        assert [watcher.next()["type"], watcher.next()["type"]] == ["reset", "rule"]


@pytest.mark.parametrize("type_", ["", "nothing", "gap", "STORED"])
def test_events_of_an_unknown_type_are_refused(api: httpx.Client, type_: str) -> None:
    assert errors_of(api.get(EVENTS, params={"type": ["stored", type_]})) == ["type.1"]


def test_events_after_a_short_disconnect_resume_without_gap(fresh: Service, client: httpx.Client) -> None:
    with watching(fresh, type="rule") as watcher:
        client.put("/admin/v1/rules/seen", json={})
        assert watcher.next()["rule"]["name"] == "seen"
        last_id = watcher.last_id
    client.put("/admin/v1/rules/missed", json={})
    client.delete("/admin/v1/rules/missed")
    with watching(fresh, last_id) as watcher:
        assert [watcher.next()["change"], watcher.next()["change"]] == ["set", "removed"]


def test_events_after_a_long_disconnect_begin_with_the_gap(fresh: Service) -> None:
    with watching(fresh) as watcher:
        last_id = watcher.last_id
    for number in range(event_feed.MAX_EVENTS + 7):
        fresh.context.feed.changed(EventType.CONFIG, {"number": number}, 1.0)
    with watching(fresh, last_id) as watcher:
        assert watcher.next() == {"type": "gap", "missed": 7}
        assert watcher.next()["number"] == 7


@pytest.mark.parametrize("last_id", ["", "5", "00000000-1", "x", "%00", "-1", "{name}-99999999", "{name}-1e3"])
def test_an_id_of_another_process_is_a_gap_of_unknown_size(service: Service, last_id: str) -> None:
    with watching(service, last_id.format(name=service.context.feed.name)) as watcher:
        assert watcher.next() == {"type": "gap", "missed": None}


def test_events_to_a_slow_client_count_the_gaps_exactly(fresh: Service) -> None:
    count = 5 * event_feed.MAX_EVENTS
    feed = fresh.context.feed
    with watching(fresh) as watcher:
        for number in range(count):
            feed.changed(EventType.CONFIG, {"number": number}, 1.0)
        accounted = delivered = 0
        while accounted < count:
            event = watcher.next()
            accounted += event.get("missed", 1)
            if event["type"] == "config":
                delivered += 1
                assert event["number"] == accounted - 1, "the gap is exact"
    assert accounted == count
    assert delivered < count


# --- the feed


@given(st.lists(st.tuples(st.sampled_from(["push", "read"]), st.integers(1, 40)), max_size=40))
def test_every_event_is_read_once_in_order_or_counted_as_lost(steps: list[tuple[str, int]]) -> None:
    feed, pushed, seen = EventFeed(lambda event: None, slot_tokens=16), 0, 0
    for step, number in steps:
        if step == "push":
            for _ in range(number):
                pushed += 1
                feed.publish(RegretBatch(float(pushed), [b"k"] * (number * 500), [0.0] * (number * 500)))
        else:
            lost, events = feed.read(seen, number)
            seen += lost
            assert [event.number for event in events] == list(range(seen + 1, seen + 1 + len(events)))
            assert [event.time_s for event in events] == [float(event.number) for event in events]
            seen += len(events)
            assert seen == pushed or len(events) == number
        lost, held = feed.read(0, 10**6)
        assert len(held) <= event_feed.MAX_EVENTS
        assert sum(len(event.keys) for event in held) <= event_feed.MAX_KEYS
        assert lost + len(held) == pushed == feed.last_number


def test_prompts_are_sent_to_those_that_ask_with_a_hash_for_each_full_block(service: Service) -> None:
    def ask(name: str, num_tokens: int) -> None:
        service.engine.answer(LoopRequest(name, num_tokens, seed=41, num_output_tokens=2))
        service.settle()

    with watching(service) as others, watching(service, type=["prompt"]) as watcher:
        ask("long", 1100)
        ask("longer", 1600)
        long, longer = watcher.next(), watcher.next()
        seen = [others.next()["type"] for _ in range(4)]
    assert (long["input_length"], long["output_length"], long["block_size"], long["blocks"]) == (1100, 2, 16, 68)
    assert (longer["input_length"], longer["blocks"]) == (1600, 100)
    assert longer["hashes"][:68] == long["hashes"]
    assert len(set(longer["hashes"])) == 100
    assert "prompt" not in seen
