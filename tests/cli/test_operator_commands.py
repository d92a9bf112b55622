"""What an operator asks at night: what happens now, why a request missed, what is in the pool, what was changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kvferry.app.cli import main
from kvferry.app.cli.top import sparkline
from kvferry.app.telemetry.miss_texts import CAUSES, EVICTED, NOT_STORED, SHORT
from kvferry.core.stats import EvictionReason, MissCause, NotStored
from tests.cli.conftest import COMMAND_DEADLINE_S, Run, command_environment
from tests.harness.http_server import serve
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service, start_service
from tests.harness.waiting import DEADLINE_S, wait_until


def test_requests_lists_what_served_their_prompts(ask: Run) -> None:
    shown = ask("requests", "--limit", "2")
    assert shown.code == 0
    assert re.search(r"^r3 +finished +128 +\d+ +\d+ +- +\d+ ", shown.out, re.MULTILINE), shown.out
    assert "there are more" in shown.err
    (arrived,) = re.findall(r"^r3 .* (20\d\d-\d\d-\d\d \d\d:\d\d:\d\d) ", shown.out, re.MULTILINE)
    assert (
        ask("requests", "--limit", "1", "--json").json["items"][0]["arrived_at"].startswith(arrived.replace(" ", "T"))
    )
    assert [item["id"] for item in ask("requests", "--json").json["items"]] == ["r3", "r2", "r1", "r0"]
    none = ask("requests", "--state", "loading")
    assert (none.code, none.out) == (0, "")
    refused = ask("requests", "--state", "asleep")
    assert refused.code == 1
    assert "state" in refused.err


def test_requests_in_80_columns_stays_a_table_with_times(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "narrow", num_slots=8) as service:
        for number in range(2):
            service.engine.answer(LoopRequest(f"chatcmpl-{number}-0123456789abcdef", 12_800, seed=number))
            service.settle()
        lines = run("requests", URL=service.url, columns=80).out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split() for line in lines[:2]] == [
        ["first", "mostly"],
        ["id", "state", "device", "pool", "tiers", "computed", "token", "arrived", "at", "because"],
    ]
    assert sum(bool(re.match(r"chat.* 20\d\d-\d\d-\d\d ", line)) for line in lines) == 2


def test_why_of_a_request_whose_blocks_were_evicted_says_so(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "small", num_slots=8) as service:
        service.context.prompts.start()
        for name, seed in (("first", 1), ("other", 2), ("again", 1)):
            service.engine.answer(LoopRequest(name, 128, seed=seed, kv_transfer_params={"store": name != "again"}))
            service.settle()
        service.settle_history()
        last = service.engine.offload.requests.find("again", time.time())
        assert last is not None
        wait_until(lambda: service.context.partings.story(last.sequence) is not None, "its prompt is compared")
        shown = run("why", "again", URL=service.url)
        assert (shown.code, shown.err) == (0, "")
        assert "again is finished: 128 prompt tokens" in shown.out
        assert "128 (100.0%) were computed" in shown.out
        assert "Its first 128 tokens, all of its whole blocks, are those of request first." in shown.out
        assert "112: evicted to make space; a larger KVFERRY_POOL_BYTES would have kept them" in shown.out
        assert "not: disabled (store=false, from request)" in shown.out
        (command,) = re.findall(r"kvferry (evictions --since \S+ --until \S+)", shown.out)
        found = run(*command.split(), "--json", URL=service.url).json["items"]
        assert {item["request"] for item in found} >= {"first"}


def test_breaks_shows_the_span_or_how_to_keep_token_ids(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "broken", num_slots=64) as service:
        service.context.prompts.start()
        without = run("breaks", URL=service.url)
        assert (without.code, without.out) == (0, "")
        assert "kvferry config set explain_bytes=64MiB" in without.err
        assert run("config", "set", "explain_bytes=16MiB", URL=service.url).code == 0
        for number in range(2):
            tokens = [*range(40), 900 + number, *range(300, 500)]
            service.engine.answer(LoopRequest(f"at{number}", len(tokens), head=tokens))
            service.settle()
        wait_until(lambda: bool(run("breaks", "--json", URL=service.url).json["items"]), "they are compared")
        shown = run("breaks", URL=service.url)
        assert (shown.code, shown.err) == (0, "")
        assert "At token 40: 192 tokens computed again" in shown.out
        before = " ".join(map(str, range(24, 40)))
        contents = [f"  after: {before}", "  earlier: 900", "  later: 901"]
        assert shown.out.splitlines()[1:5] == [*contents, "  such as at0 and at1"]
        assert run("breaks", "--window-s", "0", URL=service.url).code == 2


def test_why_when_a_policy_forbids_loads_names_where_it_is_set(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "ruled", num_slots=8) as service:
        assert run("rules", "set", "slow", "--request", "again*", "load=false", URL=service.url).code == 0
        for name, seed in (("first", 1), ("other", 2), ("again", 1)):
            service.engine.answer(LoopRequest(name, 128, seed=seed))
            service.settle()
        shown = run("why", "again", URL=service.url)
        assert "Its policy forbids loads, whatever the pool and tiers hold: load=false, from rule:slow" in shown.out
        assert "forbids loads" not in run("why", "first", URL=service.url).out


def test_change_notes_how_it_is_taken_back(ask: Run) -> None:
    changed = ask("policy", "set", "store=false", "max_load_tokens=64")
    assert "until: kvferry policy set store=null max_load_tokens=null" in changed.err
    back = ask("policy", "set", "store=null", "max_load_tokens=null")
    assert (back.code, back.err) == (0, "")
    assert "until: kvferry config set log_level=null" in ask("config", "set", "log_level=warning").err
    assert ask("config", "set", "log_level=null").err == ""


def test_refusal_of_a_field_names_it_once(ask: Run) -> None:
    refused = ask("policy", "set", "store=perhaps")
    assert refused.code == 1
    assert refused.err.startswith("kvferry: Invalid fields: store: ")
    assert refused.err.count("store") == 1


def test_why_of_a_request_before_it_arrives_shows_its_override(ask: Run) -> None:
    assert ask("policy", "request", "set", "tomorrow", "store=false", "--ttl-s", "60").code == 0
    shown = ask("why", "tomorrow")
    assert shown.code == 0
    assert "tomorrow is expected" in shown.out
    assert "An override of store holds until" in shown.out
    gone = ask("why", "no such request")
    assert gone.code == 1
    assert "404" in gone.err


def test_why_has_a_sentence_for_every_cause() -> None:
    assert set(CAUSES) == {cause.value for cause in MissCause}
    assert set(EVICTED) == {reason.value for reason in EvictionReason}
    assert set(NOT_STORED) == {reason.value for reason in NotStored}


def test_each_cause_has_three_words_that_no_other_has() -> None:
    assert [set(part) for part in SHORT.values()] == [set(CAUSES), set(EVICTED), set(NOT_STORED)]
    texts = [text for part in SHORT.values() for text in part.values()]
    assert len(set(texts)) == len(texts)
    assert all(len(text.split()) <= 3 for text in texts)


def test_requests_shows_why_most_was_computed_in_three_words(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "small", num_slots=8) as service:
        for number, seed in enumerate((1, 2, 1)):
            service.engine.answer(LoopRequest(f"r{number}", 128, seed=seed))
            service.settle()
        rows = run("requests", "--limit", "2", URL=service.url).out.splitlines()[1:]
        assert re.search(r"^ +no room left ", run("stats", URL=service.url).out, re.MULTILINE)
    assert [row.strip().rsplit("  ", 1)[-1] for row in rows] == ["no room left", "not seen before"]


def test_policy_show_without_limits_on_tiers_says_all(ask: Run) -> None:
    assert re.search(r"^tiers +all +default *$", ask("policy", "show").out, re.MULTILINE)


def test_blocks_pin_and_unpin(ask: Run) -> None:
    shown = ask("blocks", "--limit", "3")
    assert shown.code == 0
    assert len(shown.out.splitlines()) == 4
    assert "there are more" in shown.err
    hashes = ask("blocks", "--hashes", "--limit", "3").out.split()
    assert [item["hash"] for item in ask("blocks", "--limit", "3", "--json").json["items"]] == hashes
    pinned = ask("pin", hashes[0], "--ttl-s", "60")
    assert pinned.code == 0
    assert re.search(r"^pinned until +20", pinned.out, re.MULTILINE)
    assert re.search(r"^state +pinned *$", ask("blocks", hashes[0]).out, re.MULTILINE)
    assert re.search(r"^pinned until +- *$", ask("unpin", hashes[0]).out, re.MULTILINE)
    assert ask("blocks", hashes[0], "--json").json["pinned_until"] is None
    again = ask("unpin", hashes[0])
    assert again.code == 1
    assert "404" in again.err


def test_config_set_changes_a_setting_and_audit_shows_it(ask: Run) -> None:
    changed = ask("config", "set", "KVFERRY_LOG_LEVEL=warning", "max_pinned_fraction=0.5")
    assert changed.code == 0, changed.err
    assert re.search(r"^LOG_LEVEL +warning +set over HTTP *$", changed.out, re.MULTILINE)
    assert ask("config", "set", "log_level=null", "max_pinned_fraction=null", "--json").json["log_level"]["value"]
    refused = ask("config", "set", "port=1")
    assert refused.code == 1
    assert "409" in refused.err
    shown = ask("audit", "--limit", "3")
    assert shown.code == 0
    calls = [line for line in shown.out.splitlines() if re.search("PATCH +config", line)]
    assert len(calls) == 3
    assert re.search(r"409 +refused +port=\*\*\* *$", calls[0])
    assert [item["status"] for item in ask("audit", "--limit", "3", "--json").json["items"]] == [409, 200, 200]


def test_top_without_a_terminal_prints_one_view(ask: Run, service: Service) -> None:
    samples, snapshot = service.context.samples, service.engine.offload.snapshot()
    samples.add(snapshot, time.time())
    service.engine.answer(LoopRequest("watched", 128, seed=77))
    service.settle()
    samples.add(service.engine.offload.snapshot(), time.time())
    service.degraded.append("tier disk: is full")
    try:
        shown = ask("top")
    finally:
        service.degraded.clear()
    assert shown.code == 0, shown.err
    assert re.search(r"^prompt tokens +[1-9][\d,]*/s: [\d.]+% device, .*[\d.]+% computed", shown.out, re.MULTILINE)
    assert re.search(r"\b(host|recomputed)\b", shown.out) is None, "other words than on the dashboard"
    assert "16 of 16 slots in use" in shown.out
    assert "degraded: tier disk: is full" in shown.out


def test_top_without_any_sample_prints_totals_only(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "new") as service:
        shown = run("top", "--once", URL=service.url)
    assert shown.code == 0, shown.err
    assert re.search(r"^prompt tokens +none", shown.out, re.MULTILINE)


def test_sparkline_of_shares_shows_zero_and_nothing_apart() -> None:
    assert sparkline([None, 0.0, 0.5, 1.0]) == " ▁▄█"


def test_tables_in_a_pipe_keep_each_row_on_one_line(service: Service, clean_world: Path) -> None:
    name = "a-long-request-id-" + "x" * 100
    service.engine.answer(LoopRequest(name, 32, seed=5))
    service.settle()
    environment = command_environment(URL=service.url, READ_TOKEN=READ)
    del environment["COLUMNS"]
    command = [sys.executable, "-m", "kvferry.app.cli", "requests", "--limit", "1"]
    text = subprocess.check_output(command, env=environment, cwd=clean_world, text=True, timeout=COMMAND_DEADLINE_S)
    rows = text.splitlines()
    assert len(rows) == 2
    assert name in rows[1]


def test_times_of_audit_are_utc_to_the_second(ask: Run) -> None:
    ask("config", "set", "log_level=null")
    time_of = ask("audit", "--limit", "1").out.splitlines()[1][:19]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(time_of + "Z")).total_seconds()) < 60


def test_reset_of_everything_without_a_terminal_needs_yes(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "full") as service:
        service.engine.answer(LoopRequest("one", 128, seed=1))
        service.settle()
        counted = run("reset", "--dry-run", URL=service.url)
        assert (counted.code, counted.out[:30]) == (0, "would drop: pool 8 blocks (32.")
        assert " reset?dry_run=true" in run("audit", "--limit", "1", URL=service.url).out
        refused = run("reset", URL=service.url)
        assert refused.code == 2
        assert "pool 8 blocks" in refused.err
        assert "--yes" in refused.err
        assert service.engine.offload.snapshot().pool.ready == 8
        assert run("reset", "--yes", URL=service.url).out.startswith("dropped: pool 8 blocks")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tier", "host"), "drops everything in host: pool 8 blocks"),
        (("--request", "*"), "drops everything: pool 8 blocks"),
        (("--request", "**", "--tenant", "*"), "drops everything: pool 8 blocks"),
    ],
)
def test_reset_that_matches_everything_without_a_terminal_needs_yes(
    run: Run, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    with start_service(tmp_path / "whole", num_slots=8) as service:
        service.engine.answer(LoopRequest("r0", 128))
        service.settle()
        refused = run("reset", *words, URL=service.url)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err
        assert run("reset", *words, "--yes", URL=service.url).out.startswith("dropped: pool 8 blocks")


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "words",
    [
        ("pin", "00", "--ttl-s"),
        ("policy", "request", "set", "r", "store=false", "--ttl-s"),
        ("reset", "--drain-timeout-s"),
        ("replay", "trace", "--speed"),
        ("stats", "--watch", "--interval-s"),
        ("top", "--interval-s"),
        ("demo", "--think-s"),
        ("demo", "--scale"),
    ],
    ids=lambda words: words[0] + words[-1],
)
def test_option_when_it_is_no_number_is_bad_usage(run: Run, words: tuple[str, ...], number: str) -> None:
    done = run(*words, number, URL="http://127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert words[-1] in done.err


@pytest.mark.parametrize(
    "words", [("why", "r0"), ("requests",), ("top", "--once"), ("stats",), ("reset", "--yes")], ids=" ".join
)
def test_command_when_the_service_is_older_says_so(run: Run, words: tuple[str, ...]) -> None:
    older = FastAPI()
    older.get("/admin/v1/requests/r0")(lambda: {"id": "r0", "state": "finished", "prompt_tokens": {"total": 3}})
    older.get("/admin/v1/requests")(lambda: {"items": [{"id": "r0", "state": "finished"}], "next_cursor": None})
    older.get("/admin/v1/stats")(lambda: {"uptime_s": 1.0})
    older.post("/admin/v1/reset")(lambda: JSONResponse({"epoch": 1}, headers={"X-Request-ID": "r"}))
    older.get("/admin/v1/stats/history")(lambda: {"interval_s": 1, "columns": [], "rows": []})
    with serve(older) as running:
        done = run(*words, URL=running.url)
    assert (done.code, done.out) == (1, "")
    assert "the service has another version" in done.err
    assert "KeyError" not in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("reset", "--yes"),
        ("reset", "--yes", "--json"),
        ("tiers", "detach", "disk"),
        ("policy", "request", "clear", "r0"),
    ],
    ids=" ".join,
)
def test_change_when_another_service_answers_is_refused(run: Run, words: tuple[str, ...]) -> None:
    other = FastAPI()
    other.post("/{path:path}")(lambda: {"status": "ok"})
    other.delete("/{path:path}", status_code=204)(lambda: None)
    with serve(other) as running:
        done = run(*words, URL=running.url)
    assert (done.code, done.out) == (1, "")
    assert "is not kvferry's" in done.err


FORGED = "x\nforged\r\u2028\u202e\x9b\tforged[red]:warning:"
"""Begins new lines, controls a terminal, and has markup and emoji codes of Rich."""

PARSED = ("columns", "seen_at", "started_at", "time")


def _forged(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: part if name in PARSED else _forged(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_forged(part) for part in value]
    return value + FORGED if isinstance(value, str) else value


def _forging(url: str) -> FastAPI:
    """A service that appends FORGED to each text of another one's answers, and sends events."""
    service = FastAPI()

    @service.get("/admin/v1/events")
    def events() -> Response:
        event = json.dumps({"type": FORGED, "time": FORGED, "name": FORGED, FORGED: [FORGED]})
        return Response(f"data: {event}\n\n", media_type="text/event-stream")

    @service.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def forward(request: Request) -> Response:
        async with httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=DEADLINE_S
        ) as http:
            target = str(request.url).removeprefix(str(request.base_url))
            answer = await http.request(
                request.method, f"/{target}", content=await request.body(), headers={"Content-Type": "application/json"}
            )
        return JSONResponse(_forged(answer.json()), answer.status_code, {"X-Request-ID": "r"})

    return service


@pytest.mark.parametrize(
    "words",
    [
        ("stats",),
        ("top",),
        ("requests",),
        ("requests", "--state", "asleep"),
        ("why", "r0"),
        ("blocks",),
        ("pin", "aa"),
        ("evictions",),
        ("events",),
        ("audit",),
        ("tenants", "list"),
        ("rules", "set", "a", "--request", "a*", "store=false"),
        ("policy", "show"),
        ("policy", "request", "set", "a", "store=false"),
        ("config", "show"),
        ("reset", "--tier", "none", "--yes"),
        ("tiers", "attach", "a", '{"type": "no such"}'),
    ],
    ids=" ".join,
)
def test_server_text_with_newlines_is_printed_on_one_line(service: Service, run: Run, words: tuple[str, ...]) -> None:
    with serve(_forging(service.url)) as forging:
        done = run(*words, URL=forging.url)
    printed = done.out + done.err
    assert re.search("x\ufffd\\s*f", printed), printed
    assert not re.search("^forged", printed, re.MULTILINE), printed
    assert all(char.isprintable() for char in printed.replace("\n", "")), printed


@pytest.mark.parametrize("words", [("reset", "--yes"), ("tiers", "detach", "disk")], ids=" ".join)
def test_command_that_drains_waits_for_longer(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    limits: list[object] = []

    def late(self: httpx.Client, method: str, url: str, **request: object) -> None:
        limits.append(request["timeout"])
        raise httpx.ReadTimeout("late")

    monkeypatch.setattr(httpx.Client, "request", late)
    code = main([*words, "--drain-timeout-s", "60", "--url", "http://127.0.0.1:1"])
    assert (code, limits) == (3, [90.0])


def test_tiers_when_none_is_attached_says_so(ask: Run) -> None:
    shown = ask("tiers", "list")
    assert (shown.code, shown.out) == (0, "")
    assert "no tier is attached" in shown.err


def test_tiers_list_and_stats_when_a_tier_is_broken_name_the_problem(run: Run, tmp_path: Path) -> None:
    with start_service(tmp_path / "broken", admin_token=ADMIN) as service:
        found = {"URL": service.url, "columns": 200, "ADMIN_TOKEN": ADMIN}
        definition = f'{{"type": "fs", "path": "{tmp_path}/tier", "max_bytes": "1GiB"}}'
        attached = run("tiers", "attach", "disk", definition, **found)
        used = r"0 B of 1\.0 TiB +0 +0"
        assert re.search(rf"^disk +fs +true +runtime +{used} +works *$", attached.out, re.MULTILINE), attached.out
        assert "degraded" not in run("stats", **found).out
        listed = run("tiers", "list", **found).out
        assert re.search(rf"^disk +fs +true +runtime +{used} +works *$", listed, re.MULTILINE), listed
        off = rf"^disk +fs +false +runtime +{used} +tier disk: is disabled by an operator *$"
        for command in ("disable disk", "list"):
            assert re.search(off, run("tiers", *command.split(), **found).out, re.MULTILINE), command
        service.degraded.append("tier disk: the disk is gone; no block is kept or found")
        service.reasons.append("stopping")
        lines = run("stats", **found).out.splitlines()
    assert [line.strip() for line in lines[1:3]] == [
        "not ready: stopping",
        "degraded: tier disk: the disk is gone; no block is kept or found",
    ]


def test_tiers_list_shows_size_hits_and_health(run: Run) -> None:
    counts = {"bytes": 3 << 20, "max_bytes": 4 << 20, "found": 3, "looked_up": 4, "loaded": 1200, "look_up_s": 0.25}
    counts["gave_up"] = 7
    tier = {"name": "disk", "enabled": True, "source": "settings", "definition": {"type": "fs"}, "counts": counts}
    unused = tier | {"name": "new", "counts": dict.fromkeys(counts, 0) | {"look_up_s": None}}
    service = FastAPI()
    service.get("/admin/v1/tiers")(lambda: {"items": [tier | {"health": []}, unused | {"health": ["is full"]}]})
    with serve(service) as running:
        head, *rows = run("tiers", "list", URL=running.url).out.splitlines()
        as_json = run("tiers", "list", "--json", URL=running.url).json
    assert head.split() == [
        "name",
        "type",
        "enabled",
        "source",
        "used",
        "loaded",
        "hit",
        "rate",
        "look",
        "up",
        "gave",
        "up",
        "health",
    ]
    assert re.fullmatch(r"disk +fs +true +settings +3.0 MiB of 4.0 MiB +1,200 +75.0% +250 ms +7 +works *", rows[0])
    assert re.fullmatch(r"new +fs +true +settings +0 B +0 +- +- +0 +is full *", rows[1])
    assert as_json["items"][0]["health"] == []
