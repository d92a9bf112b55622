"""`kvferry replay` against an engine: what is sent, what is reported, and what is no trace."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import RedirectResponse

from kvferry.app.replay.trace import BadTrace, read_trace, sample_trace
from tests.cli.conftest import COMMAND_DEADLINE_S, Run, command_environment
from tests.harness.commands import start_command
from tests.harness.engine_peer import EnginePeer
from tests.harness.http_server import Running, serve
from tests.harness.waiting import wait_until


@pytest.fixture
def peer() -> EnginePeer:
    return EnginePeer()


@pytest.fixture
def engine(peer: EnginePeer) -> Iterator[Running]:
    with serve(peer.app) as running:
        yield running


def line(input_length: int, hash_ids: list[int], output_length: int = 64, timestamp: int = 0) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def write(folder: Path, *lines: dict[str, Any] | str) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
    return str(path)


def test_where_the_tokens_came_from(run: Run, peer: EnginePeer, engine: Running, clean_world: Path) -> None:
    trace = write(clean_world, line(1024, [1, 2]), line(1024, [1, 2]), "", line(1300, [1, 2, 3], output_length=600))
    done = run("replay", trace, "--concurrency", "1", "--max-output", "8", "--json", "--url", engine.url)
    assert done.code == 0, done.err
    report = done.json
    assert report["requests"] == 3
    assert (report["failed"], report["truncated"], report["errors"]) == (0, 0, {})
    assert report["prompt_tokens"] == 32 + 32 + 41
    assert report["output_tokens"] == 2 + 2 + 8
    assert report["cache"]["prompt_tokens"] == 105
    assert report["cache"]["host_tokens"] == 32
    assert report["cache"]["recomputed_tokens"] == 73
    assert report["cache"]["device_tokens"] == 0
    assert report["cache"]["tier_tokens"] == {"fs": 0}
    assert set(report["first_token_s"]) == {"p50", "p90", "p99"}
    assert report["total_s"] > 0
    first, second, third = (body["prompt"] for body in peer.bodies)
    assert first == second == third[:32]
    assert all(3 <= token <= 249 for token in third)
    assert all(body["ignore_eos"] and body["return_token_ids"] and body["stream"] for body in peer.bodies)
    assert all(body["model"] == "peer" for body in peer.bodies)
    assert len(set(peer.request_ids)) == 3


def test_replay_without_a_trace_sends_generated_conversations(run: Run, peer: EnginePeer, engine: Running) -> None:
    done = run("replay", "--requests", "20", "--concurrency", "1", "--url", engine.url)
    assert done.code == 0, done.err
    prompts = [tuple(body["prompt"]) for body in peer.bodies]
    assert len(set(prompts)) == 20
    beginnings = {prompt[:64] for prompt in prompts}
    assert 1 < len(beginnings) <= 4


def test_generated_trace_of_a_seed_is_the_same_and_goes_on() -> None:
    trace = sample_trace(3)
    assert trace == sample_trace(3) != sample_trace(4)
    known: set[tuple[int, ...]] = set()
    continued = 0
    for request in trace:
        continued += any(request.hash_ids[:length] in known for length in range(8, len(request.hash_ids)))
        known.add(request.hash_ids)
    assert continued > len(trace) / 2


def test_stats_are_printed_as_a_table(run: Run, engine: Running, clean_world: Path) -> None:
    done = run("replay", write(clean_world, line(512, [1]), line(512, [1])), "--url", engine.url, "--concurrency", "1")
    assert done.code == 0, done.err
    for words in (
        "requests",
        "16 for 512 of the trace",
        "50.0% pool",
        "computed",
        "first token p99",
        "stored",
        "loaded",
    ):
        assert words in done.out


def test_the_same_seed_sends_the_same_tokens_and_another_does_not(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    trace = write(clean_world, line(2000, [5, 6, 7, 8]))
    for seed in ("1", "1", "2"):
        assert run("replay", trace, "--url", engine.url, "--seed", seed, "--json").code == 0
    one, again, other = (body["prompt"] for body in peer.bodies)
    assert one == again != other


def test_prompts_are_cut_to_the_context_and_counted(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    trace = write(clean_world, line(512 * 20, list(range(20)), output_length=512), line(512, [1]))
    done = run("replay", trace, "--url", engine.url, "--max-output", "16", "--json", "--concurrency", "1")
    assert done.code == 0, done.err
    assert done.json["truncated"] == 1
    assert [len(body["prompt"]) + body["max_tokens"] for body in peer.bodies] == [256, 18]


def test_the_number_asked_for_is_sent_and_no_later_line_is_read(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    trace = write(clean_world, line(512, [1]), line(512, [2]), "not json")
    done = run("replay", trace, "--requests", "2", "--url", engine.url, "--json")
    assert (done.code, len(peer.bodies)) == (0, 2)


def test_as_many_at_once_as_asked_for_and_no_more(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    peer.gather = 3
    trace = write(clean_world, *(line(512, [number]) for number in range(9)))
    done = run("replay", trace, "--concurrency", "3", "--url", engine.url, "--json")
    assert done.code == 0, done.err
    assert peer.most_running == 3


def test_replay_when_calls_fail_counts_errors_and_continues(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    peer.fail_every, peer.break_every = 4, 3
    trace = write(clean_world, *(line(512, [number]) for number in range(8)))
    done = run("replay", trace, "--concurrency", "1", "--url", engine.url, "--json")
    assert done.code == 1
    assert len(peer.bodies) == 8
    assert done.json["failed"] == 4
    assert done.json["errors"] == {"no room today (503)": 2, "lost it (200)": 2}
    assert "2 x no room today (503)" in done.err
    assert done.json["prompt_tokens"] == 4 * 16


def test_replay_on_a_terminal_shows_counts_that_add_up_in_each_frame(
    peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    peer.fail_every = 3
    num_requests = 60
    trace = write(clean_world, *(line(512, [number]) for number in range(num_requests)))
    terminal, ours = pty.openpty()
    env = command_environment() | {"TERM": "xterm"}
    with (clean_world / "out").open("w") as out:
        command = start_command(("replay", trace, "--url", engine.url), env, clean_world, out, ours)
    os.close(ours)
    shown = b""
    # Reading from a terminal that its last process has closed fails on Linux.
    with suppress(OSError):
        while data := os.read(terminal, 4096):
            shown += data
    os.close(terminal)
    assert command.wait(COMMAND_DEADLINE_S) == 1
    frames = re.findall(rb"replaying.*?(\d+) answered, (\d+) failed, (\d+) to go", shown)
    assert len(frames) > 1, shown
    assert {sum(map(int, frame)) for frame in frames} == {num_requests}
    assert tuple(map(int, frames[-1])) == (40, 20, 0)


def test_replay_when_interrupted_reports_what_has_ended(peer: EnginePeer, engine: Running, clean_world: Path) -> None:
    trace = write(clean_world, line(512, [1]), line(512, [2]), line(512, [3], timestamp=10**9))
    words = ("replay", trace, "--concurrency", "1", "--respect-timestamps", "--url", engine.url, "--json")
    with (clean_world / "out").open("w+") as out, (clean_world / "err").open("w+") as err:
        command = start_command(words, command_environment(), clean_world, out, err)
        wait_until(lambda: len(peer.bodies) == 2, "the second request has begun", COMMAND_DEADLINE_S)
        command.send_signal(signal.SIGINT)
        assert command.wait(COMMAND_DEADLINE_S) == 1
    assert json.loads((clean_world / "out").read_text())["requests"] in (1, 2)
    assert "interrupted: " in (clean_world / "err").read_text()
    assert "of 3 requests have ended" in (clean_world / "err").read_text()


def session(*requests: dict[str, Any]) -> str:
    return json.dumps({"id": "any", "block_size": 64, "hash_id_scope": "local", "requests": requests})


def turn(t: float, input_tokens: int, *hash_ids: int, think: float = 0.0) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": input_tokens, "out": 8, "hash_ids": hash_ids, "think_time": think}


def test_sessions_are_read_with_ids_of_their_own_and_sub_agents_after_them(tmp_path: Path) -> None:
    helper = {"t": 20.0, "type": "subagent", "requests": [turn(0.0, 70, 1), turn(5.0, 200, 1, 2, 3, think=2.0)]}
    (tmp_path / "a.json").write_text(session(turn(0.0, 130, 1, 2), helper, turn(40.0, 192, 1, 2, 5, think=7.0)))
    (tmp_path / "b.json").write_text(session(turn(1.0, 64, 1)))
    trace = read_trace(tmp_path)
    assert [(one.session_id, one.timestamp, one.input_length, one.delay) for one in trace] == [
        ("a", 0.0, 130, 0.0),
        ("a/1", 20_000.0, 70, 0.0),
        ("a/1", 25_000.0, 200, 2000.0),
        ("a", 40_000.0, 192, 7000.0),
        ("b", 61_000.0, 64, 0.0),
    ]
    first, helper_first, helper_next, last, other = (one.hash_ids for one in trace)
    # The last block has an id too, which no other request has.
    assert (len(first), len(helper_first), len(helper_next), len(last), len(other)) == (3, 2, 4, 3, 1)
    assert first[:2] == last[:2] == helper_next[:2]
    assert helper_first[0] == first[0] != other[0]
    assert len({first[2], helper_first[1], helper_next[3], last[2], other[0]}) == 5
    assert {one.block_size for one in trace} == {64}
    assert [one.session_id for one in read_trace(tmp_path / "b.json")] == ["b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "request: "),
        ("{}", "block_size: Field required"),
        (session({"t": -1.0}), "requests.0.t: Input should be greater than or equal to 0"),
        (session(turn(0.0, 64, -1)), "requests.0.hash_ids.0: Input should be greater than or equal to 0"),
        (session(turn(0.0, 64, 1) | {"think_time": "soon"}), "think_time: Input should be a valid number"),
        (session(), "contains no request"),
    ],
)
def test_malformed_sessions_are_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(content)
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_sessions_when_replayed_keep_their_order_and_think_times(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    folder = clean_world / "sessions"
    folder.mkdir()
    turns = [turn(float(at), 64 * (at + 1), *range(1, at + 2), think=100.0 * (at == 2)) for at in range(3)]
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text(session(*turns))
    words = ("--sessions", "--speed", "1000", "--concurrency", "2", "--tokens-per-hash", "16", "--requests", "9")
    done = run("replay", str(folder), *words, "--url", engine.url, "--json")
    assert (done.code, done.json["requests"]) == (0, 6), done.err
    assert "the trace has 6 requests, fewer than --requests 9" in done.err
    # Of each session, which its first block shows, the prompts grow from one to the next.
    prompts = [tuple(body["prompt"]) for body in peer.bodies]
    lengths: dict[tuple[int, ...], list[int]] = {}
    for prompt in prompts:
        lengths.setdefault(prompt[:16], []).append(len(prompt))
    assert list(lengths.values()) == [[16, 32, 48]] * 2
    assert done.json["total_s"] >= 0.1, "a think time of 100 s at 1000 times the speed"
    plain = run("replay", write(clean_world, line(512, [1])), "--sessions", "--url", engine.url)
    assert "the trace names no sessions" in plain.err


def test_timestamps_are_kept_in_order(run: Run, peer: EnginePeer, engine: Running, clean_world: Path) -> None:
    trace = write(clean_world, *(line(512, [number], timestamp=number * 100) for number in range(4)))
    done = run("replay", trace, "--respect-timestamps", "--speed", "2", "--url", engine.url, "--json")
    assert done.code == 0, done.err
    assert done.json["total_s"] >= 0.15, "the last one is due at 300 ms of the trace, at double speed"


def test_an_engine_that_does_not_say_its_context_gets_whole_prompts(run: Run, clean_world: Path) -> None:
    peer = EnginePeer(context_tokens=None)
    with serve(peer.app) as running:
        trace = write(clean_world, line(512 * 20, list(range(20))))
        assert run("replay", trace, "--url", running.url, "--json").code == 0
    assert len(peer.bodies[0]["prompt"]) == 320


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "request: Invalid JSON"),
        ("[1]", "request: "),
        (line(0, []), "input_length: Input should be greater than or equal to 1"),
        (line(512, [1], output_length=-1), "output_length: Input should be greater than or equal to 0"),
        (line(513, [1]), "input_length 513 has 2 blocks of 512 tokens, and hash_ids has 1 ids"),
        ({"timestamp": 0, "input_length": 5, "output_length": 1}, "hash_ids: Field required"),
        (line(512, [True]), "hash_ids.0: Input should be a valid integer"),
        (line(512, [1], timestamp=-1), "timestamp: Input should be greater than or equal to 0"),
        (line(512, [1], timestamp=1e300), "timestamp: Input should be less than or equal to 100000000000000"),
        (line(512, [-1]), "hash_ids.0: Input should be greater than or equal to 0"),
        (line(512, [1 << 63]), "hash_ids.0: Input should be less than 9223372036854775808"),
        (line(512 * 9999, [-1] * 9999), "hash_ids.1: Input should be greater than or equal to 0; and more"),
        (line(512, [1], output_length=10**12), "output_length: Input should be less than or equal to 16777216"),
        (line(512, [1]) | {"input_length": "512"}, "input_length: Input should be a valid integer"),
        ("[" * 100_000, "Invalid JSON"),
    ],
)
def test_malformed_lines_are_named(bad: Any, said: str, clean_world: Path) -> None:
    trace = Path(write(clean_world, line(512, [1]), bad))
    with pytest.raises(BadTrace) as caught:
        read_trace(trace)
    assert str(caught.value).startswith(f"{trace}, line 2: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(read_trace(trace, 1)) == 1


def test_a_malformed_line_is_bad_usage(run: Run, clean_world: Path) -> None:
    done = run("replay", write(clean_world, line(512, [1]), "{"), "--url", "http://127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert "trace.jsonl, line 2: request: Invalid JSON" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b"\n\n", "contains no request"), (b"\xff", "UTF-8")]
)
def test_files_that_are_no_trace(content: bytes | None, said: str, run: Run, clean_world: Path) -> None:
    if content is not None:
        (clean_world / "t").write_bytes(content)
    done = run("replay", "t")
    assert done.code == 2
    assert said in done.err


ADMIN_TOKEN = "admin-token-of-the-service"
ENGINE_KEY = "key-of-the-engine"


def test_replay_when_the_engine_is_elsewhere_sends_it_no_token(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    admin_peer = EnginePeer()
    with serve(admin_peer.app) as admin:
        words = ("replay", write(clean_world, line(512, [1])), "--url", admin.url, "--engine-url", engine.url)
        assert run(*words, ADMIN_TOKEN=ADMIN_TOKEN).code == 0
        assert peer.authorizations == {"/v1/models": {None}, "/v1/completions": {None}}
        (clean_world / "key").write_text(ENGINE_KEY + "\n")
        assert run(*words, ADMIN_TOKEN=ADMIN_TOKEN, ENGINE_API_KEY_FILE="key").code == 0
    key = f"Bearer {ENGINE_KEY}"
    assert peer.authorizations == {"/v1/models": {None, key}, "/v1/completions": {None, key}}
    assert admin_peer.authorizations == {"/admin/v1/stats": {f"Bearer {ADMIN_TOKEN}"}}


def test_replay_when_the_engine_is_the_service_sends_the_token(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    words = ("replay", write(clean_world, line(512, [1])), "--url", engine.url)
    assert run(*words, ADMIN_TOKEN=ADMIN_TOKEN).code == 0
    assert run(*words, "--engine-url", f"{engine.url}/", ADMIN_TOKEN=ADMIN_TOKEN).code == 0
    assert set.union(*peer.authorizations.values()) == {f"Bearer {ADMIN_TOKEN}"}
    assert run(*words, ADMIN_TOKEN=ADMIN_TOKEN, ENGINE_API_KEY=ENGINE_KEY).code == 0
    assert peer.authorizations["/v1/completions"] == {f"Bearer {ADMIN_TOKEN}", f"Bearer {ENGINE_KEY}"}
    assert peer.authorizations["/admin/v1/stats"] == {f"Bearer {ADMIN_TOKEN}"}


def test_replay_when_an_env_file_names_the_engine_sends_no_key(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    (clean_world / ".env").write_text(f"KVFERRY_URL={engine.url}\n")
    trace = write(clean_world, line(512, [1]))
    done = run("replay", trace, ENGINE_API_KEY=ENGINE_KEY)
    assert (done.code, peer.authorizations) == (2, {})
    assert "the token is from elsewhere" in done.err
    assert run("replay", trace, "--url", engine.url, ENGINE_API_KEY=ENGINE_KEY).code == 0


def test_replay_when_the_engine_redirects_does_not_follow(
    run: Run, peer: EnginePeer, engine: Running, clean_world: Path
) -> None:
    redirecting = FastAPI()
    redirecting.get("/v1/models")(lambda: {"data": [{"id": "peer"}]})
    redirecting.post("/v1/completions")(lambda: RedirectResponse(f"{engine.url}/v1/completions"))
    with serve(redirecting) as first:
        words = ("replay", write(clean_world, line(512, [1])), "--url", engine.url, "--engine-url", first.url)
        done = run(*words, ADMIN_TOKEN=ADMIN_TOKEN, ENGINE_API_KEY=ENGINE_KEY)
    assert done.code == 1
    assert set(peer.authorizations) == {"/admin/v1/stats"}


@pytest.mark.parametrize("bad", ["http://user:pw@127.0.0.1:1", "engine"])
def test_replay_when_the_engine_url_is_bad_names_the_option(run: Run, clean_world: Path, bad: str) -> None:
    done = run("replay", write(clean_world, line(512, [1])), "--engine-url", bad, URL="http://127.0.0.1:9")
    assert done.code == 2
    assert done.err.startswith("kvferry: --engine-url=")
    assert "must be a URL such as" in done.err
