"""Commands against a real service: tables for people, JSON for programs, exit codes for scripts."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import typer
from rich.console import Console

from kvferry.app.cli.entry import app
from kvferry.app.cli.stats import add_up, render
from kvferry.app.common.discovery import announce_service
from kvferry.core.keys import tenant_digest
from tests.cli.conftest import COMMAND_DEADLINE_S, Ran, Run, command_environment
from tests.harness.commands import start_command
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service, start_service
from tests.harness.server_process import free_port


def test_stats(ask: Run, service: Service) -> None:
    shown = ask("stats")
    assert (shown.code, shown.err) == (0, "")
    for words in ("kvferry", "tiny on cpu", "prompt tokens", "device", "pool", "computed", "pool slots", "evictions"):
        assert words in shown.out
    assert re.search(r"\b(host|recomputed|epoch)\b", shown.out) is None, "other words than on the dashboard"
    answer = ask("stats", "--json")
    assert answer.code == 0
    assert answer.json["pool"]["slots"] == 16
    total = answer.json["prompt_tokens"]["total"]
    assert total >= 4 * 128
    assert re.search(rf"^prompt tokens +{total:,} *$", shown.out, re.MULTILINE)


def test_stats_when_an_engine_has_ranks_adds_them_up(run: Run, service: Service, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with start_service(tmp_path / "other", admin_token=ADMIN, read_token=READ, num_slots=8) as other:
        other.engine.answer(LoopRequest("other", 128, seed=9))
        other.settle()
        for rank, one in enumerate((service, other)):
            announce_service(state, f"chat-dp{rank}", one.url, "chat")
        announce_service(state, "alone", other.url)
        found = {"STATE_DIR": str(state), "READ_TOKEN": READ}
        asked = run("stats", "--json", **found)
        assert asked.code == 2
        assert "several services are running" in asked.err
        parts = [run("stats", "--json", "--url", one.url, **found).json for one in (service, other)]
        whole = run("stats", "--json", "--engine", "chat", **found).json
        shown = run("stats", "--engine", "chat", **found)
    assert whole["engine"] == {**parts[0]["engine"], "workers": 2, "ranks": 2}
    assert whole["pool"]["slots"] == 16 + 8
    assert whole["pool"]["slot_bytes"] == parts[0]["pool"]["slot_bytes"]
    for section, name in (("prompt_tokens", "recomputed"), ("store", "stored"), ("store", "bytes")):
        assert whole[section][name] == parts[0][section][name] + parts[1][section][name]
    tails = [part["missed_tokens"]["causes"]["tail"] for part in parts]
    assert whole["missed_tokens"]["causes"]["tail"] == sum(tails)
    assert whole["offloading"]["is_on"] is True
    assert whole["recovery"] is None
    assert "2 data-parallel ranks" in shown.out


def test_stats_when_offloading_is_off_without_errors_show_why() -> None:
    console = Console(width=120, file=io.StringIO())
    console.print(render({"engine": {}, "offloading": {"is_on": False, "reason": "a truncated file", "num_errors": 0}}))
    assert isinstance(console.file, io.StringIO)
    assert "OFF: a truncated file" in console.file.getvalue()


@pytest.mark.parametrize(("free", "used"), [(4, "0 B"), (3, "256.0 MiB"), (0, "1.0 GiB")])
def test_stats_when_slots_are_free_shows_the_share_in_use(free: int, used: str) -> None:
    pool = {"slots": 4, "free": free, "slot_bytes": 1 << 28, "bytes": 1 << 30}
    console = Console(width=120, file=io.StringIO())
    console.print(render({"engine": {}, "pool": pool}))
    assert f"{used} of 1.0 GiB in use" in console.file.getvalue()  # type: ignore[attr-defined]


RANK = {
    "window_s": 600.0, "cost_s": 2.0, "hook_s": 1.5, "load_wait_s": 0.5, "gain_s": 3.0, "net_s": 1.0,
    "saved_tokens": 300, "prefill_tokens_per_s": 100.0, "paused": False, "storing": "on", "since": None, "reason": None,
}  # fmt: skip


def balance_lines(*ranks: dict[str, object]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render(add_up([{"engine": {}, "balance": rank} for rank in ranks])))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_stats_show_the_balance_of_all_ranks() -> None:
    shown = balance_lines(RANK, RANK)
    assert "last 10m 0s: saved 6.00 s (600 tokens, computed at 200/s), cost 4.00 s" in shown
    assert "net +2.00 s" in shown
    assert "storing is" not in shown


def test_stats_of_a_rank_without_prefill_rate_claim_no_gain() -> None:
    shown = balance_lines(RANK, RANK | {"gain_s": None, "net_s": None, "prefill_tokens_per_s": None})
    assert "saved 600 tokens, of which the time is not measured yet, cost 4.00 s" in shown
    assert "net" not in shown


def test_stats_show_that_a_rank_is_paused() -> None:
    paused = RANK | {"paused": True, "storing": "paused", "since": "2026-01-31T12:00:00.000Z", "reason": "it cost"}
    assert add_up([{"balance": RANK}, {"balance": paused}])["balance"]["paused"] is True
    assert "storing is paused since 2026-01-31T12:00:00.000Z: it cost" in balance_lines(RANK, paused)


def test_stats_show_the_advice_of_the_rank_where_it_is_worth_most() -> None:
    some, more = (
        {"kind": "pool", "seconds_per_hour": seconds, "text": f"It would save {seconds:.0f} s.", "command": "kvferry x"}
        for seconds in (20.0, 30.0)
    )
    parts = [{"engine": {}, "advice": advice} for advice in (some, more, None)]
    assert add_up(parts)["advice"] == more
    assert add_up([parts[2], parts[2]])["advice"] is None
    console = Console(width=80, file=io.StringIO())
    console.print(render(add_up(parts)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"^advice +It would save 30 s. kvferry x *$", shown, re.MULTILINE)


@contextmanager
def watching(service: Service, folder: Path, *words: str) -> Iterator[IO[str]]:
    """The output of a command that runs until it is interrupted."""
    reader, writer = os.pipe()
    with open(reader) as lines, (folder / "errors").open("w+") as errors:
        env = command_environment(URL=service.url, READ_TOKEN=READ)
        command = start_command(words, env, folder, writer, errors)
        os.close(writer)
        yield lines
        command.send_signal(signal.SIGINT)
        assert command.wait(COMMAND_DEADLINE_S) == 0
        assert (folder / "errors").read_text() == ""


def test_stats_watch_in_a_pipe_streams_objects_and_tables(service: Service, clean_world: Path) -> None:
    with watching(service, clean_world, "stats", "--watch", "--json", "--interval-s", "0.1") as lines:
        uptimes = [json.loads(lines.readline())["uptime_s"] for _ in range(3)]
    assert uptimes == sorted(uptimes)
    with watching(service, clean_world, "stats", "--watch", "--interval-s", "0.1") as lines:
        heads = list(itertools.islice((line for line in lines if line.startswith("kvferry  ")), 2))
    assert len(heads) == 2, "a pipe receives each snapshot"


def test_policy_show_and_set(ask: Run) -> None:
    shown = ask("policy", "show")
    assert shown.code == 0
    assert "offload_prompt_only" in shown.out
    assert "env" in shown.out
    changed = ask("policy", "set", "offload_prompt_only=false", "max_offload_tokens=unlimited", "--json")
    assert changed.code == 0
    assert changed.json["offload_prompt_only"] == {"value": False, "source": "runtime"}
    assert changed.json["max_offload_tokens"] == {"value": "unlimited", "source": "runtime"}
    back = ask("policy", "set", "offload_prompt_only=null", "max_offload_tokens=null")
    assert back.code == 0
    assert "runtime" not in back.out


def test_policy_of_one_request(ask: Run) -> None:
    put = ask("policy", "request", "set", "team/job 7", "store=false", "priority=low", "--ttl-s", "60")
    assert put.code == 0
    assert "override" in put.out
    assert "expires at" in put.err
    shown = ask("policy", "request", "show", "team/job 7", "--json")
    assert shown.json["store"] == {"value": False, "source": "override"}
    assert shown.json["id"] == "team/job 7"
    cleared = ask("policy", "request", "clear", "team/job 7", "--json")
    assert (cleared.code, cleared.json) == (0, {"request": "team/job 7", "cleared": True})
    gone = ask("policy", "request", "show", "team/job 7")
    assert gone.code == 1
    assert gone.err.count("\n") == 1
    assert "404" in gone.err


def test_rules(ask: Run, clean_world: Path) -> None:
    none = ask("rules", "list")
    assert (none.code, none.out) == (0, "")
    assert "no rules" in none.err
    salt = "a-salt-that-nobody-may-see"
    (clean_world / "salt").write_text(salt + "\n")
    made = ask(
        "rules", "set", "batch", "store=false", "max_offload_tokens=unlimited", "--order", "5", "--request", "batch-*",
        "--lora", "?*", "--priority", "-3..5", "--prompt-tokens", "8192..", "--cache-salt-file", "salt", "--json",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert made.json == {
        "name": "batch",
        "order": 5,
        "match": {
            "request": "batch-*",
            "lora": "?*",
            "session": None,
            "tenant": tenant_digest(salt),
            "priority": {"min": -3, "max": 5},
            "prompt_tokens": {"min": 8192, "max": None},
        },
        "policy": {"store": False, "max_offload_tokens": "unlimited"},
    }
    assert ask("rules", "show", "batch", "--json").json == made.json
    shield = ask("rules", "set", "vip", "--order", "-1", "--prompt-tokens", "7")
    assert shield.code == 0, shield.err
    listed = ask("rules", "list")
    assert re.search(r"^ *-1 +vip +prompt_tokens=7 +- *$", listed.out, re.MULTILINE), listed.out
    assert listed.code == 0
    assert listed.out.index("vip") < listed.out.index("batch")
    assert "priority=-3..5" in listed.out
    assert "prompt_tokens=8192.." in listed.out
    assert salt not in listed.out
    assert [rule["name"] for rule in ask("rules", "list", "--json").json["items"]] == ["vip", "batch"]
    refused = ask("rules", "set", "bad name", "store=1")
    assert refused.code == 1
    assert "policy.store: " in refused.err
    deleted = ask("rules", "delete", "batch", "--json")
    assert (deleted.code, deleted.json) == (0, {"name": "batch", "deleted": True})
    gone = ask("rules", "delete", "batch")
    assert gone.code == 1
    assert "404" in gone.err
    assert ask("rules", "delete", "vip").out.split() == ["name", "vip", "deleted", "true"]


@pytest.mark.parametrize("as_json", [False, True])
def test_events_as_lines(as_json: bool, service: Service, ask: Run, clean_world: Path) -> None:
    with watching(service, clean_world, "events", "--type", "rule", *["--json"] * as_json) as shown:
        lines = [shown.readline()]
        assert "open" in lines[0]
        assert ask("rules", "set", "told", "store=false").code == 0
        assert ask("rules", "delete", "told").code == 0
        lines += [shown.readline(), shown.readline()]
    if as_json:
        assert [json.loads(line)["type"] for line in lines] == ["open", "rule", "rule"]
    else:
        assert re.match(r"\d{4}-\d\d-\d\d \S+  rule +change=set rule=.*told", lines[1])
        assert "change=removed" in lines[2]


def test_refusal_by_the_server_is_one_line_with_the_field(ask: Run) -> None:
    refused = ask("config", "set", "store_threshold=0", "log_levl=debug")
    assert refused.code == 1
    assert refused.out == ""
    assert refused.err.count("\n") == 1
    assert "store_threshold: must be" in refused.err
    assert "log_levl: no such setting; did you mean log_level?" in refused.err
    assert "422" in refused.err


@pytest.mark.parametrize("words", [("policy", "set"), ("policy", "request", "set", "r"), ("rules", "set", "r")])
def test_policy_field_when_unknown_is_refused_with_the_nearest(ask: Run, words: tuple[str, ...]) -> None:
    refused = ask(*words, "offload_promt_only=true")
    assert (refused.code, refused.out) == (2, "")
    assert "offload_promt_only is no field of a policy; did you mean offload_prompt_only?" in refused.err


def test_evictions(ask: Run) -> None:
    shown = ask("evictions", "--reason", "capacity", "--since", "1h")
    assert shown.code == 0, shown.err
    assert "capacity" in shown.out
    assert "r0" in shown.out
    page = ask("evictions", "--limit", "3", "--json")
    assert len(page.json["items"]) == 3
    assert page.json["next_cursor"]
    rest = ask("evictions", "--limit", "1000", "--cursor", page.json["next_cursor"], "--json")
    everything = ask("evictions", "--limit", "1000", "--json").json["items"]
    assert page.json["items"] + rest.json["items"] == everything
    more = ask("evictions", "--limit", "3")
    assert "there are more" in more.err
    none = ask("evictions", "--request", "nobody")
    assert (none.code, none.out) == (0, "")
    assert "no evictions" in none.err
    later = ask("evictions", "--since", "2100-01-01T00:00:00Z", "--json")
    assert later.json == {"items": [], "next_cursor": None}


def test_evictions_in_sum(ask: Run) -> None:
    summary = ask("evictions", "--summary", "--json")
    assert summary.json["by_reason"]["capacity"] >= 16
    shown = ask("evictions", "--summary", "--until", "2100-01-01T00:00:00+02:00")
    assert shown.code == 0
    assert re.search(r"^regret rate +0.0% *$", shown.out, re.MULTILINE)
    refused = ask("evictions", "--summary", "--reason", "capacity")
    assert refused.code == 2


def test_get_shows_any_answer_and_refuses_as_other_commands(ask: Run, run: Run, service: Service) -> None:
    stats = ask("get", "/admin/v1/stats")
    assert (stats.code, stats.err) == (0, "")
    assert re.search(r"^pool slots +16 *$", stats.out, re.MULTILINE)
    assert ask("get", "stats", "--json").json["pool"]["slots"] == 16
    page = ask("get", "/admin/v1/requests?limit=2&state=finished")
    assert len(re.findall(r"^id +r[0-3] *$|^r[0-3] ", page.out, re.MULTILINE)) == 2
    assert "there are more: raise the limit, or continue with cursor " in page.err
    hashes = [item["hash"] for item in ask("get", "blocks?limit=2", "--json").json["items"]]
    wide = ask("get", "blocks?limit=2", "--wide").out
    assert all(whole in wide for whole in hashes)
    history = ask("get", "stats/history?window_s=60", columns=400)
    assert (history.code, history.err) == (0, "nothing to show\n")
    unknown = ask("get", "/admin/v1/nothing")
    assert (unknown.code, unknown.out, "404" in unknown.err) == (1, "", True)
    refused = ask("get", "requests?limit=0")
    assert (refused.code, "limit: " in refused.err) == (1, True)
    stream = ask("get", "stats/stream?interval_s=1")
    assert (stream.code, "kvferry stats --watch" in stream.err) == (2, True)
    without = run("get", "stats", URL=service.url)
    assert (without.code, "give the token by --token-file" in without.err) == (1, True)


def test_config_show(ask: Run) -> None:
    shown = ask("config", "show")
    assert shown.code == 0
    assert ADMIN not in shown.out
    assert READ not in shown.out
    assert "ADMIN_TOKEN" in shown.out
    assert ask("config", "show", "--json").json["admin_token"]["value"] == "***"


def test_reset_by_match_then_all(run: Run, clean_world: Path) -> None:
    # A service of its own: others need blocks in the pool.
    with start_service(clean_world / "own", num_slots=16) as service:
        service.engine.answer(LoopRequest("one", 128))
        service.settle()
        none = run("reset", "--request", "nobody-*", "--reason", "a test", "--json", URL=service.url)
        assert (none.code, none.json["dropped_blocks"], none.json["pending_jobs"]) == (0, 0, 0)
        (clean_world / "salt").write_text("nobody's")
        nobodys = run("reset", "--cache-salt-file", "salt", "--json", URL=service.url)
        assert (nobodys.code, nobodys.json["dropped_blocks"]) == (0, 0)
        shown = run("reset", "--tier", "host", "--drain-timeout-s", "5", "--yes", URL=service.url)
        assert shown.code == 0, shown.err
        assert "dropped: pool 8 blocks" in shown.out
        again = run("reset", "--yes", "--json", URL=service.url)
        assert again.json["dropped_blocks"] == 0
        assert run("reset", "--tier", "moon", URL=service.url).code == 1


def test_url_and_token_from_env_file_and_token_file(run: Run, service: Service, clean_world: Path) -> None:
    (clean_world / "token").write_text(ADMIN + "\n")
    (clean_world / ".env").write_text(
        f"KVFERRY_URL={service.url}/\nKVFERRY_ADMIN_TOKEN_FILE=token\nKVFERRY_PORT=nonsense\n"
    )
    assert run("stats", "--json").code == 0


@pytest.mark.parametrize("words", [("stats",), ("stats", "--watch"), ("policy", "request", "clear", "x")], ids=" ".join)
def test_command_without_a_service_exits_3(words: tuple[str, ...], run: Run) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    gone = run(*words, "--url", url)
    assert (gone.code, gone.out) == (3, "")
    assert gone.err.startswith(f"kvferry: cannot reach {url}: ")
    assert "is it running? Set KVFERRY_URL or --url" in gone.err
    assert gone.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        (("stats", "--url", "localhost:8787"), {}, "url=localhost:8787 (argument): must be a URL"),
        (("stats",), {"URL": "ftp://x"}, "KVFERRY_URL=ftp://x (environment variable): must be a URL"),
        (("stats", "--url", "http://u:hunter2@h"), {}, "url=http://u:***@h (argument): must be a URL"),
        (("stats",), {"ADMIN_TOKEN": "two words"}, "KVFERRY_ADMIN_TOKEN=*** (environment variable): must be printable"),
        (("stats",), {"ADMIN_TOKEN_FILE": "gone"}, "KVFERRY_ADMIN_TOKEN_FILE=gone (environment variable): there is no"),
        (("stats", "--interval-s", "0"), {}, "--interval-s"),
        (("stats", "more"), {}, "more"),
        (("polcy",), {}, "polcy"),
        (("policy", "set"), {}, "FIELD=VALUE"),
        (("policy", "set", "store"), {}, "'store': must be store=VALUE"),
        (("policy", "set", "store=true", "store=false"), {}, "store is given twice"),
        (("rules", "set", "r", "--priority", "high"), {}, "'high': must be a number or a span"),
        (("rules", "set", "r", "--tenant", "a*", "--cache-salt-file", "/dev/null"), {}, "not both"),
        (("rules", "set", "r", "--cache-salt-file", "/dev/null"), {}, "file is empty"),
        (("rules", "set", "r", "--cache-salt-file", "gone"), {}, "gone"),
        (("evictions", "--since", "yesterday"), {}, "'yesterday': must be a time or a span"),
        (("evictions", "--limit", "0"), {}, "--limit"),
        (("replay", "--requests", "0"), {}, "--requests"),
    ],
)
def test_bad_usage(words: tuple[str, ...], settings: dict[str, str], said: str, run: Run) -> None:
    done = run(*words, **settings)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    # The default address is noted first.
    assert done.err.count("\n") <= 3


def test_command_when_standard_output_is_closed_says_so() -> None:
    words = ["sh", "-c", '"$0" -m kvferry.app.cli stats >&-', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "standard output is closed" in done.stderr


def test_output_when_the_locale_lacks_characters_replaces_them(service: Service) -> None:
    env = command_environment(URL=service.url, ADMIN_TOKEN=ADMIN)
    # So few columns that hashes are cut.
    env |= {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    for words in (["stats"], ["evictions"], ["top", "--once"]):
        command = [sys.executable, "-m", "kvferry.app.cli", *words]
        done = subprocess.run(command, env=env, capture_output=True, timeout=COMMAND_DEADLINE_S)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"?" in done.stdout


COMMANDS = [
    ("stats",),
    ("top", "--once"),
    ("requests",),
    ("why", "r0"),
    ("blocks",),
    ("policy", "show"),
    ("rules", "list"),
    ("evictions",),
    ("audit",),
    ("config", "show"),
    ("reset", "--dry-run"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_when_given_a_token_file_sends_its_token(
    words: tuple[str, ...], run: Run, service: Service, clean_world: Path
) -> None:
    (clean_world / "token").write_text(f"{ADMIN}\n")
    refused = run(*words, URL=service.url)
    assert refused.code == 1
    assert "(401); give the token by --token-file" in refused.err
    # The option is stronger than the environment.
    done = run(*words, "--token-file", "token", "--url", service.url, ADMIN_TOKEN="wrong-" + ADMIN)
    assert done.code == 0, done.err


def test_token_file_when_it_is_in_the_environment_is_used(run: Run, service: Service, clean_world: Path) -> None:
    (clean_world / "token").write_text(ADMIN)
    assert run("stats", URL=service.url, ADMIN_TOKEN_FILE="token").code == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "--token-file=token (argument): there is no such file"),
        (b"", "--token-file=token (argument): the file is empty"),
        (b"\xff", "not UTF-8 text"),
        (b"two words", "--token-file=*** (argument): "),
    ],
)
def test_token_file_when_it_holds_no_token_is_bad_usage(
    content: bytes | None, said: str, run: Run, clean_world: Path
) -> None:
    if content is not None:
        (clean_world / "token").write_bytes(content)
    done = run("stats", "--url", "http://127.0.0.1:1", "--token-file", "token")
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_commands_with_a_url_all_accept_a_token_file() -> None:
    def commands(group: typer.Typer) -> Iterator[Callable[..., object]]:
        yield from (command.callback for command in group.registered_commands if command.callback is not None)
        for nested in group.registered_groups:
            if nested.typer_instance is not None:
                yield from commands(nested.typer_instance)

    options = [set(inspect.signature(command).parameters) for command in commands(app)]
    with_url = [names for names in options if "url" in names]
    assert len(with_url) > 20
    assert all("token_file" in names for names in with_url)


def test_tenants_are_listed_limited_and_unlimited(run: Run, clean_world: Path) -> None:
    digest = "0123456789abcdef"
    # Other tests store in the pool of the shared service, which evicts from it.
    with start_service(clean_world / "service", admin_token=ADMIN, num_slots=16) as service:

        def ask(*words: str) -> Ran:
            return run(*words, URL=service.url, ADMIN_TOKEN=ADMIN)

        service.engine.answer(LoopRequest("one", 256, tenant=digest))
        service.settle()
        listed = ask("tenants", "list")
        assert (listed.code, listed.err) == (0, "")
        assert re.search(
            rf"^{digest} +64.0 KiB +unlimited \(default\) +\S+ KiB +0 +\d+ +- +\d+ *$", listed.out, re.MULTILINE
        )
        limited = ask("tenants", "limit", "1GiB", digest, "--json")
        assert limited.json["max_pool_bytes"] == {"value": 1 << 30, "source": "tenant"}
        (clean_world / "salt").write_text("a-salt\n")
        assert ask("tenants", "limit", "0", "--cache-salt-file", "salt", "--json").json["tenant"] == tenant_digest(
            "a-salt"
        )
        assert [one["pool_bytes"] for one in ask("tenants", "list", "--json").json["items"]] == [16 * 4096, 0]
        assert ask("tenants", "unlimit", digest).out.split() == ["tenant", digest, "deleted", "true"]
        refused = ask("tenants", "unlimit", digest)
        assert (refused.code, f"tenant {digest} has no limit of its own" in refused.err) == (1, True)
        assert ask("tenants", "limit", "much", digest).code == ask("tenants", "limit", "1GiB").code == 2
