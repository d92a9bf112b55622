"""`kvferry demo`: with an engine of its own, on a service of this host, and on other engines."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import Response
from rich.console import Console

from kvferry.app.cli.demo import comparison
from kvferry.app.replay.own_engine import own_engine
from kvferry.app.replay.passes import PassResult
from kvferry.app.replay.report import CacheUse
from kvferry.core.errors import StartError
from tests.cli.conftest import COMMAND_DEADLINE_S, Run, command_environment
from tests.harness.commands import Command, start_command
from tests.harness.engine_peer import EnginePeer
from tests.harness.http_server import serve
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until

SMALL = ("--conversations", "3", "--turns", "3", "--scale", "0.2", "--think-s", "0")
NOWHERE = "http://127.0.0.1:1"
ADMIN_TOKEN = "admin-token-of-the-service"
ENGINE_KEY = "key-of-the-engine"


class Peer(EnginePeer):
    """An engine with the calls of kvferry that a demonstration needs."""

    def __init__(self, *, usage: bool = True, fails: bool = False, extra: str = "") -> None:
        super().__init__(context_tokens=None)
        self._usage, self._fails, self._extra = usage, fails, extra
        self.app.get("/readyz")(lambda: {"ready": True, "reasons": [], "degraded": []})
        self.app.get("/admin/v1/requests")(lambda: {"items": [], "next_cursor": None})

    async def _complete(self, request: Request) -> Response:
        # Not the probe.
        self.fail_every = 1 if self._fails and self.bodies else None
        return await super()._complete(request)

    async def _chunks(self, body: dict[str, Any], breaks: bool) -> AsyncIterator[str]:
        if self._usage:
            yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': len(body['prompt'])}})}\n\n"
        yield self._extra
        async for chunk in super()._chunks(body, breaks):
            yield chunk


@pytest.fixture(scope="module")
def small_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A service with a token whose device holds less than the small workload, and its state folder."""
    folder = tmp_path_factory.mktemp("small")
    with serving(folder, device_blocks=48, pool_bytes="64MiB", admin_token=ADMIN_TOKEN) as served:
        yield served, folder


@pytest.fixture
def folder(clean_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of commands."""
    folder = clean_world / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@contextmanager
def running_demo(clean_world: Path) -> Iterator[Command]:
    """A demonstration on an engine of its own, which does not end by itself; what it says is in the file `err`."""
    env = command_environment(STATE_DIR=str(clean_world / "state"), URL=NOWHERE)
    with (clean_world / "out").open("w+") as out, (clean_world / "err").open("w+") as err:
        command = start_command(("demo", "--think-s", "600"), env, clean_world, out, err)
        said = clean_world / "err"
        wait_until(lambda: "watch it live: " in said.read_text(), "the demo runs", COMMAND_DEADLINE_S)
        yield command


def test_demo_without_a_service_uses_its_own_and_leaves_nothing(run: Run, folder: Path, clean_world: Path) -> None:
    # Settings for services of the user do not apply to the demo's own, and the default port may be another user's.
    given = {"STATE_DIR": str(clean_world / "state"), "MODEL": "/nowhere"}
    done = run("demo", *SMALL, "--json", "--seed", "7", **given)
    assert done.code == 0, done.err
    assert "starting an engine for the demo" in done.err
    report = done.json
    assert (report["compared"], report["model"], report["seed"]) == ("offloading", "tiny", 7)
    without, offloading = report["passes"]
    for result in (without, offloading):
        assert (result["requests"], result["failed"]) == (9, 0)
        assert result["cache"]["prompt_tokens"] == result["prompt_tokens"]
        assert set(result["first_token_s"]) == {"p50", "p95"}
    assert (without["cache"]["host_tokens"], without["cache"]["stored_blocks"]) == (0, 0)
    assert offloading["cache"]["stored_blocks"] > 0
    assert list(folder.glob("kvferry-*")) == []
    assert not (clean_world / "state").exists()


def test_demo_when_interrupted_leaves_nothing(folder: Path, clean_world: Path) -> None:
    with running_demo(clean_world) as command:
        command.send_signal(signal.SIGINT)
        assert command.wait(COMMAND_DEADLINE_S) == 1
    said = clean_world / "err"
    assert said.read_text().endswith("kvferry: interrupted\n")
    assert list(folder.glob("kvferry-*")) == []
    (port,) = re.findall(r"watch it live: http://127.0.0.1:(\d+)/ui/", said.read_text())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_own_engine_when_it_does_not_start_shows_the_end_of_its_log(folder: Path, clean_world: Path) -> None:
    with pytest.raises(StartError, match="KVFERRY_BLOCK_SIZE"), own_engine({"BLOCK_SIZE": -1}):
        pass
    assert list(folder.iterdir()) == []


def test_demo_on_a_service_of_this_host_shows_what_was_loaded(
    run: Run, small_device: tuple[Served, Path], clean_world: Path
) -> None:
    served, folder = small_device
    given = {"STATE_DIR": str(folder), "ADMIN_TOKEN": ADMIN_TOKEN}
    assert run("demo", *SMALL, STATE_DIR=str(folder)).code == 1
    done = run("demo", *SMALL, **given)
    assert done.code == 0, done.err
    assert f"watch it live: {served.url}/ui/" in done.err
    assert "without offloading: 9 of 9 requests, median time to first token" in done.err
    rows = {row[0]: row[1:] for row in (re.split(r" {2,}", line.strip()) for line in done.out.splitlines())}
    assert rows["requests"] == ["9", "9"]
    loaded = [int(number.replace(",", "")) for number in rows["from the pool and tiers"]]
    assert loaded[0] == 0 < loaded[1]
    computed = [int(number.replace(",", "")) for number in rows["computed"][:2]]
    assert computed[1] < computed[0]
    assert rows["computed"][2].endswith("fewer")
    (request_id,) = re.findall(r"kvferry why (\S+)", done.out)
    explained = run("why", request_id, **given)
    assert explained.code == 0, explained.err
    assert explained.out.startswith(f"{request_id} is finished: ")


def test_comparison_of_a_demo_fits_80_columns() -> None:
    def result(title: str, median_s: float) -> PassResult:
        cache = CacheUse(112_983, 55_424, 31_904, {}, 57_559, 0, 0, 0, 0, 0)
        return PassResult(title, 60, 0, {}, 112_983, 0, {"p50": median_s, "p95": 1.0}, 16.6, cache)

    console = Console(width=80, file=io.StringIO())
    console.print(comparison([result("without offloading", 3.2), result("with offloading", 0.163)], with_changes=True))
    median = console.file.getvalue().splitlines()[1]  # type: ignore[attr-defined]
    assert re.split(" {2,}", median.strip()) == ["time to first token, median", "3.2 s", "163 ms", "19.6x faster"]


def test_comparison_of_a_demo_with_failed_requests_adds_up() -> None:
    def result(title: str, cache: CacheUse | None) -> PassResult:
        return PassResult(title, 60, 2, {"lost": 2}, 900, 0, {}, 16.6, cache)

    console = Console(width=80, file=io.StringIO())
    caches = [CacheUse(1000, 100, 300, {"fs": 50}, 550, 0, 0, 0, 0, 0), None]
    console.print(comparison([result("without offloading", caches[0]), result("with offloading", caches[1])]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = {cells[0]: cells[1:] for cells in (re.split(" {2,}", line.strip()) for line in lines)}
    assert rows["prompt tokens"] == ["1,000", "-"]
    assert [rows[name] for name in ("computed", "from the device", "from the pool and tiers")] == [
        ["550", "-"],
        ["100", "-"],
        ["350", "-"],
    ]


def test_demo_when_the_policy_forbids_storing_and_loads_says_so(run: Run, small_device: tuple[Served, Path]) -> None:
    served, _ = small_device
    rule = {"match": {"request": "demo-*-with-*"}, "policy": {"load": False, "max_offload_tokens": 0}}
    served.http.put("/admin/v1/rules/slow", json=rule)
    done = run("demo", *SMALL, "--url", served.url, ADMIN_TOKEN=ADMIN_TOKEN)
    served.http.delete("/admin/v1/rules/slow")
    assert done.code == 0, done.err
    assert "The pass with offloading stored nothing" in done.out
    assert "9 requests with offloading were forbidden to load: load=false, from rule:slow." in done.out
    assert "Nothing was loaded" in done.out
    assert not re.search("x (faster|slower)|% (fewer|more)|about the same", done.out)


@pytest.mark.long
def test_demo_when_requests_may_not_set_their_policy_says_so(run: Run, clean_world: Path) -> None:
    with serving(clean_world / "state", request_fields="max_offload_tokens") as served:
        done = run("demo", *SMALL, "--url", served.url)
    assert done.code == 0, done.err
    assert "The pass without offloading did store or load: " in done.out
    assert "KVFERRY_REQUEST_FIELDS" in done.out
    assert "The device's cache held most of it by itself" in done.out


def test_demo_on_an_engine_alone_names_the_option_and_sends_no_token(run: Run, clean_world: Path) -> None:
    peer = EnginePeer()
    with serve(peer.app) as running:
        done = run("demo", *SMALL, "--url", running.url, ADMIN_TOKEN=ADMIN_TOKEN, ENGINE_API_KEY=ENGINE_KEY)
        assert (done.code, "--admin-url" in done.err) == (2, True)
        assert peer.authorizations == {}


def test_demo_when_requests_fail_reports_them(run: Run, clean_world: Path) -> None:
    with serve(Peer(fails=True).app) as running:
        done = run("demo", *SMALL, "--url", running.url)
    assert done.code == 1
    assert "without offloading: 3 x no room today (503)" in done.err
    assert "without offloading: 2 of 9 requests, 2 of them failed" in done.err
    assert "failed" in done.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--admin-url", NOWHERE), 2, "name the engine with --url"),
        (("--url", NOWHERE), 3, "cannot reach"),
        (("--url", "engine"), 2, "--url=engine"),
        (("--conversations", "0"), 2, "--conversations"),
    ],
)
def test_demo_when_it_cannot_run_says_why(
    run: Run, clean_world: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    done = run("demo", *words)
    assert done.code == code
    assert said in done.err


def test_demo_when_the_engine_reports_no_usage_refuses(run: Run, clean_world: Path) -> None:
    with serve(Peer(usage=False).app) as running:
        done = run("demo", *SMALL, "--url", running.url)
    assert (done.code, done.out) == (1, "")
    assert "stream_options.include_usage" in done.err


@pytest.mark.parametrize(
    ("chunk", "field"),
    [
        ('{"choices": 3}', "choices"),
        ('{"choices": [3]}', "choices.0"),
        ('{"choices": [], "usage": {"prompt_tokens": -9}}', "usage.prompt_tokens"),
        ('{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": "q"}}}', "usage.prompt_tokens_details"),
    ],
)
def test_demo_when_the_engine_answers_nonsense_names_the_field(
    run: Run, clean_world: Path, chunk: str, field: str
) -> None:
    with serve(Peer(extra=f"data: {chunk}\n\n").app) as running:
        done = run("demo", *SMALL, "--url", running.url)
    assert (done.code, done.out) == (1, "")
    assert f"stream chunk is not of OpenAI's API: {field}" in done.err


def test_demo_when_prompts_exceed_the_context_names_the_options(
    run: Run, small_device: tuple[Served, Path], clean_world: Path
) -> None:
    served, _ = small_device
    seen = served.stats()["requests"]["seen"]
    done = run("demo", "--url", served.url, ADMIN_TOKEN=ADMIN_TOKEN)
    assert done.code == 1
    assert "set --turns or --scale lower" in done.err
    assert served.stats()["requests"]["seen"] == seen + 1
