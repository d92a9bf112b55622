"""`kvferry record`: traffic of a live service becomes a trace without contents, which other commands read."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.app.replay.trace import read_trace
from kvferry.app.telemetry.events import EventType
from tests.cli.conftest import COMMAND_DEADLINE_S, Run, command_environment
from tests.harness.commands import Command, start_command
from tests.harness.loop_engine import BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import READ, Service
from tests.harness.service_process import serving
from tests.harness.waiting import wait_until


@contextmanager
def recording(service: Service, folder: Path, *words: str) -> Iterator[tuple[Command, Callable[[], str]]]:
    """A recorder with the read token that has begun, and what it has printed."""
    env = command_environment(URL=service.url, READ_TOKEN=READ)
    errors = folder / "stderr"
    with errors.open("w") as file:
        process = start_command(("record", "--out", "trace.jsonl", *words), env, folder, file, file)
    try:
        wait_until(lambda: "recording" in errors.read_text() or process.poll() is not None, "it records")
        yield process, errors.read_text
    finally:
        process.kill()


def answer(service: Service, name: str, num_tokens: int, seed: int, num_output_tokens: int = 3) -> None:
    service.engine.answer(LoopRequest(name, num_tokens, seed=seed, num_output_tokens=num_output_tokens))
    service.settle()


def test_record_when_requests_end_writes_their_lengths_and_shared_blocks(
    run: Run, service: Service, clean_world: Path
) -> None:
    with recording(service, clean_world, "--requests", "4") as (process, printed):
        # The same prompt, a longer one that begins with it, another one, and one that is shorter than a block.
        answer(service, "secret-name", 2 * BLOCK_TOKENS, seed=901, num_output_tokens=5)
        answer(service, "again", 2 * BLOCK_TOKENS + 10, seed=901)
        answer(service, "other", BLOCK_TOKENS + 1, seed=902)
        answer(service, "short", 10, seed=901)
        assert process.wait(COMMAND_DEADLINE_S) == 0, printed()
    path = clean_world / "trace.jsonl"
    trace = read_trace(path)
    assert [one.hash_ids for one in trace] == [(0, 1), (0, 1, 2), (3, 4), (5,)]
    assert [(one.input_length, one.output_length) for one in trace] == [(32, 5), (42, 3), (17, 3), (10, 3)]
    assert {one.block_size for one in trace} == {BLOCK_TOKENS}
    assert trace[0].timestamp == 0
    assert sorted(one.timestamp for one in trace) == [one.timestamp for one in trace]
    assert "secret-name" not in path.read_text()
    assert "4 requests, 6 different blocks" in printed()
    feed = service.context.feed

    def publishes_prompts() -> bool:
        before = feed.last_number
        answer(service, f"after-{before}", 30, seed=903)
        return any(event.type is EventType.PROMPT for event in feed.read(before, 100)[1])

    wait_until(lambda: not publishes_prompts(), "nothing is published for a recorder that is gone")
    done = run("what-if", "--trace", str(path), "--pool-blocks", "4", "--json")
    assert done.json["prompt_tokens"] == sum(one.input_length for one in trace)
    eager = next(curve for curve in done.json["curves"] if curve["store_mode"] == "eager")
    assert eager["points"][-1]["hit_rate"] * done.json["prompt_tokens"] == 2 * BLOCK_TOKENS


def test_record_when_terminated_leaves_a_valid_trace(service: Service, clean_world: Path) -> None:
    path = clean_world / "trace.jsonl"
    path.write_text("an older trace")
    with recording(service, clean_world) as (process, printed):
        answer(service, "one", 700, seed=903)
        wait_until(lambda: path.read_text().endswith("}\n"), "the request is written")
        process.send_signal(signal.SIGTERM)
        assert process.wait(COMMAND_DEADLINE_S) == 0, printed()
    assert [one.input_length for one in read_trace(path)] == [700]


def test_record_when_the_disk_is_full_keeps_what_was_written(run: Run, service: Service, clean_world: Path) -> None:
    path = clean_world / "trace.jsonl"
    with recording(service, clean_world) as (process, printed):
        answer(service, "one", 700, seed=904)
        wait_until(lambda: path.read_text().endswith("}\n"), "the request is written")
        # Less than six lines, and more than all that is printed.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (400, 400))
        for number in range(5):
            answer(service, f"another{number}", 700, seed=905)
        assert process.wait(COMMAND_DEADLINE_S) == 1, printed()
    assert [one.input_length for one in read_trace(path, 1)] == [700]
    assert "File too large" in printed()
    refused = run("record", "--out", str(clean_world), URL=service.url, READ_TOKEN=READ)
    assert (refused.code, "Is a directory" in refused.err) == (1, True)


@pytest.mark.long
def test_recorded_trace_when_replayed_shares_the_same_prefixes(run: Run, clean_world: Path) -> None:
    with serving(clean_world / "state", device_blocks=256) as served:
        env = command_environment(URL=served.url)
        errors = clean_world / "stderr"
        with errors.open("w") as file:
            words = ("record", "--out", "trace.jsonl", "--requests", "4")
            process = start_command(words, env, clean_world, file, file)
        wait_until(lambda: "recording" in errors.read_text(), "it records")
        for number in range(4):
            prompt = [3 + (number % 2 * 17 + index * 7 + index // 240) % 240 for index in range(1100)]
            served.complete(prompt, f"r{number}", max_tokens=2)
        assert process.wait(COMMAND_DEADLINE_S) == 0, errors.read_text()
        trace = read_trace(clean_world / "trace.jsonl")
        # 68 full blocks, and one that is not.
        assert [one.hash_ids[:2] for one in trace] == [(0, 1), (69, 70), (0, 1), (69, 70)]
        done = run("replay", "trace.jsonl", "--concurrency", "1", "--max-output", "1", "--json", "--url", served.url)
        assert (done.code, done.json["requests"], done.json["failed"]) == (0, 4, 0), done.err
        # Of two prompts each the second finds the full blocks of the first.
        cache = done.json["cache"]
        assert cache["device_tokens"] + cache["host_tokens"] == 2 * 68 * 16


def test_record_when_no_request_ends_says_so(service: Service, clean_world: Path) -> None:
    with recording(service, clean_world) as (process, printed):
        process.send_signal(signal.SIGINT)
        assert process.wait(COMMAND_DEADLINE_S) == 1
        assert "no request ended while it was recorded" in printed()
