"""`kvferry what-if`: of a trace, and of a running service."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kvferry.app.replay.core_replay import Replay, Setup, replayed
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, sample_trace
from tests.cli.conftest import Run


@pytest.mark.long
def test_what_if_of_a_trace_replays_it(run: Run, tmp_path: Path) -> None:
    requests = sample_trace(1)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(asdict(one)) + "\n" for one in requests))
    ran = run(
        *("what-if", "--trace", str(trace), "--device-blocks", "200", "--pool-blocks", "400", "--token-bytes", "2"),
        "--json",
    )
    assert ran.code == 0, ran.err
    assert ran.json["prompt_tokens"] == sum(one.input_length for one in requests)
    sizes = [slots * TRACE_BLOCK_TOKENS * 2 for slots in (200, 400, 800)]
    rates = {}
    for curve in ran.json["curves"]:
        assert [point["bytes"] for point in curve["points"]] == sizes
        rates[curve["store_mode"], curve["eviction_policy"]] = curve["points"][1]["hit_rate"]
    assert len(rates) == 6
    full = Replay(Setup(200, 400, watermark_blocks=64)).run(replayed(requests))
    assert rates["eager", "lru"] == pytest.approx(full.hit_percent / 100)


def test_what_if_of_a_short_trace_prints_a_row_for_each_policy(run: Run, tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2, %d]}\n'
    (tmp_path / "trace.jsonl").write_text("".join(line % number for number in range(3, 6)))
    ran = run("what-if", "--trace", "trace.jsonl", "--pool-blocks", "4", "--device-blocks", "4")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0].split("  ") == ["mode and policy", "128.0 MiB", "256.0 MiB", "512.0 MiB"]
    assert [row.split()[:2] for row in ran.out.splitlines()[1:7]] == [
        [f"{mode},", policy] for mode in ("eager", "lazy") for policy in ("lru", "arc", "hazard")
    ]
    # Two of three prompts find two blocks.
    assert ran.out.count("66.6") == 18
    ran = run("what-if", "--trace", "trace.jsonl", "--device-blocks", "2")
    assert (ran.code, "the largest request needs 3" in ran.err) == (2, True)


def test_blocks_have_the_size_that_the_trace_or_the_option_says(run: Run, tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, last]} for last in (3, 4)]
    plain = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "plain.jsonl").write_text(plain)
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(line | {"block_size": 16}) + "\n" for line in lines))
    ran = run("what-if", "--trace", "plain.jsonl")
    assert (ran.code, "input_length 33 has 1 blocks of 512 tokens" in ran.err) == (2, True)
    for words in (("said.jsonl",), ("plain.jsonl", "--block-tokens", "16"), ("said.jsonl", "--block-tokens", "99")):
        ran = run("what-if", "--trace", *words, "--json")
        assert ran.code == 0, ran.err
        assert (ran.json["prompt_tokens"], ran.json["curves"][0]["points"][-1]["hit_rate"]) == (66, 32 / 66)
    mixed = [lines[0] | {"block_size": 16}, lines[0] | {"block_size": 32, "hash_ids": [1, 2]}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in mixed))
    ran = run("what-if", "--trace", "mixed.jsonl")
    assert (ran.code, "block_size 32 after 16" in ran.err) == (2, True)


def test_trace_with_prompts_shorter_than_its_blocks_says_so(run: Run, tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": size, "output_length": 1, "hash_ids": [size]} for size in (100, 511, 512)]
    notice = "2 of 3 prompts are shorter than the trace's blocks of 512 tokens"
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert notice in run("what-if", "--trace", "short.jsonl").err
    assert notice in run("replay", "short.jsonl", URL="http://127.0.0.1:1").err
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    assert "shorter" not in run("what-if", "--trace", "short.jsonl").err


def test_what_if_of_a_file_that_is_no_trace_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    ran = run("what-if", "--trace", "bad.jsonl")
    assert ran.code == 2
    assert "line 1" in ran.err
    ran = run("what-if", "--pool-blocks", "20000")
    assert (ran.code, "only with --trace" in ran.err) == (2, True)
