"""Answers of the API as tables and listings, at several widths."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from kvferry.app.cli import console, tables

HASH, REQUEST, TENANT = "cca2e8536c53bb4d" * 4, "chat-41e59e3b-174-of-a-client", "0123456789abcdef"
EVICTION: dict[str, Any] = {
    "time": "2026-01-31T12:00:00.123Z",
    "reason": "capacity",
    "hash": HASH,
    "position": 23,
    "size": 42_467_328,
    "hits": 0,
    "request": REQUEST,
    "tenant": TENANT,
}
NESTED = {
    "uptime_s": 7384.5,
    "pool": {"slots": 1_000_000, "slot_bytes": 42_467_328, "kind": "shm"},
    "hit_rate": 0.256,
    "prefill_tokens_per_s": 12_345.6,
    "first_token_s": {"p50": 0.0421},
    "policy": {"store": {"value": False, "source": "rule:a"}, "tiers": {"value": None, "source": "default"}},
    "span": {"x": 0, "none": {}, "list": []},
    "threads": [{"name": "copy", "is_alive": True}, {"name": "writer", "is_alive": False}],
    "port": 8787,
    "time": "2026-01-31T12:00:00.123Z",
}


def shown(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *columns: str, width: int = 80, is_wide: bool = False
) -> str:
    """What is printed on a terminal of this width."""
    printed = io.StringIO()
    output = console.new_console(width=width, file=printed)
    monkeypatch.setattr(tables, "out", output)
    monkeypatch.setattr(console, "out", output)
    if is_wide:
        console.widen()
    tables.show_answer(answer, *columns)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def test_table_at_90_columns_cuts_ids_and_keeps_numbers_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"items": [EVICTION], "next_cursor": None}
    header, first, second, caption = shown(page, monkeypatch, width=90).splitlines()
    assert header.split() == ["time", "reason", "hash", "position", "size", "hits", "request", "tenant"]
    assert first.split()[:2] == ["2026-01-31", "capacity"]
    assert second.split() == ["12:00:00"]
    assert "40.5 MiB" in first
    ids = [word for word in first.split() if "…" in word]
    for cut, whole in zip(ids, (HASH, REQUEST), strict=True):
        start, _, end = cut.partition("…")
        assert start
        assert end
        assert whole.startswith(start)
        assert whole.endswith(end)
    # What other commands take is whole where it can be.
    assert TENANT in first
    assert caption == "--wide shows what is cut"
    assert max(map(len, (header, first, second))) <= 90
    whole = shown(page, monkeypatch, is_wide=True)
    assert all(text in whole for text in (HASH, REQUEST, TENANT))
    assert "--wide" not in whole


def test_narrow_table_folds_values_and_cuts_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"token": "admin:1a2b3c4d", "path": "tenants/" + TENANT, "what": {"max_pool_bytes": "6.0MiB"}}
    table = shown({"items": [row]}, monkeypatch, width=45)
    assert "…" not in table
    assert "admin:1a2b3c4d" in table


def test_table_when_the_terminal_is_too_narrow_becomes_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown({"items": [EVICTION, EVICTION]}, monkeypatch, width=40).splitlines()
    assert lines.count("size      40.5 MiB") == 2
    assert max(map(len, lines)) <= 40
    assert next(line for line in lines if line.startswith("hash")).count("…") == 1


def test_columns_that_are_chosen_are_shown_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"a": 1, "part": {"host_hit": 2}, "none": None, "b_s": 0.5}, {"a": 3, "part": {"host_hit": 4}, "b_s": 90}]
    items = [{"none": None, **item} for item in items]
    rows = shown({"items": items, "more": 7}, monkeypatch, "b_s", "part.host_hit", "none", "a").splitlines()
    assert [re.split(" {2,}", row.strip()) for row in rows] == [
        ["b", "pool", "a"],
        ["500 ms", "2", "1"],
        ["1m 30s", "4", "3"],
    ]


def test_object_becomes_a_line_a_value_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    listing, _, threads = shown(NESTED, monkeypatch).partition("\n\nthreads\n")
    assert [re.split(" {2,}", line) for line in listing.splitlines()] == [
        ["uptime", "2h 3m"],
        ["pool slots", "1,000,000"],
        ["pool slot bytes", "40.5 MiB"],
        ["pool kind", "shm"],
        ["hit rate", "25.6%"],
        ["prefill tokens", "12,346/s"],
        ["first token p50", "42 ms"],
        ["policy store", "false (rule:a)"],
        ["policy tiers", "- (default)"],
        ["span x", "0"],
        ["span none", "-"],
        ["span list", "-"],
        ["port", "8787"],
        ["time", "2026-01-31 12:00:00"],
    ]
    assert [line.split() for line in threads.splitlines()] == [
        ["name", "is", "alive"],
        ["copy", "true"],
        ["writer", "false"],
    ]


def test_objects_in_a_row_keep_numbers_and_units_together(monkeypatch: pytest.MonkeyPatch) -> None:
    match = {
        "lora": None,
        "priority": {"min": -3, "max": 5},
        "prompt_tokens": {"min": 8192, "max": None},
        "a_bytes": 1 << 30,
        "b": {"c": 1},
    }
    printed = shown({"items": [{"match": match}]}, monkeypatch)
    assert "priority=-3..5 prompt_tokens=8192.. a_bytes=1.0GiB b=(c=1)" in printed


def test_columns_with_rows_become_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    history = {"interval_s": 1, "columns": ["time", "stored_bytes"], "rows": [["2026-01-31T12:00:00Z", 1024]]}
    lines = shown(history, monkeypatch).splitlines()
    assert re.split(" {2,}", lines[-1]) == ["2026-01-31 12:00:00", "1.0 KiB"]


def test_texts_of_an_answer_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "red\x1b[31m\nnew [bold]line :warning:"
    for answer in ({"items": [{text: text, "b": {text: text}}]}, {text: {text: text}, "list": [text]}):
        printed = shown(answer, monkeypatch)
        assert "\x1b" not in printed
        assert not re.search("^new", printed, re.MULTILINE)
        assert "[bold]" in printed.replace("\n", "")


def test_list_of_many_values_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = shown({"numbers": [*range(5000)]}, monkeypatch)
    assert "... (5,000 in all)" in " ".join(printed.split())
    assert len(printed.splitlines()) <= 3


def test_paths_in_listings_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "sqlite:////var/lib/" + "a" * 60 + "/kvferry.db"
    printed = shown({"url": path}, monkeypatch, width=40)
    assert path in printed.replace("\n", "").replace(" ", "")


def test_field_name_with_a_dot_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tiers are fields, and may have dots."""
    assert "tiers ssd.a  5" in shown({"tier_hit": {"ssd.a": 5}}, monkeypatch)
    assert "ssd.a" in shown({"items": [{"ssd.a": 5}]}, monkeypatch)
