"""`kvferry sessions`, and the options of other commands that name a session."""

from __future__ import annotations

from pathlib import Path

from kvferry.core.keys import tenant_digest
from tests.cli.conftest import Run
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import start_service

RED = tenant_digest("red") or ""


def test_sessions_are_listed_shown_retained_and_released(run: Run, tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("red\n")
    with start_service(tmp_path / "served") as service:

        def ask(*words: str) -> Run:
            return run(*words, URL=service.url)

        assert ask("sessions", "list").err.strip() == "no sessions"
        for number, (session, tenant) in enumerate([("a/b %", None), ("same", RED), ("same", None), (None, None)]):
            service.engine.answer(LoopRequest(f"r{number}", 128, seed=number, session=session, tenant=tenant))
            service.settle()
        shown = ask("sessions", "list")
        assert (shown.code, shown.err) == (0, "")
        assert [line.split()[0] for line in shown.out.splitlines()[1:]] == ["same", "same", "a/b"]
        listed = ask("sessions", "list", "--json", "--limit", "2").json
        assert ask("sessions", "list", "--cursor", listed["next_cursor"], "--json").json["items"][0]["id"] == "a/b %"
        assert ask("sessions", "show", "a/b %", "--json").json["pool"] == 128
        ambiguous = ask("sessions", "show", "same")
        assert ambiguous.code == 1
        assert RED in ambiguous.err
        salt = ("--cache-salt-file", str(tmp_path / "salt"))
        assert ask("sessions", "show", "same", *salt, "--json").json["tenant"] == RED
        assert ask("sessions", "show", "same", "--tenant", "", "--json").json["tenant"] is None
        kept = ask("sessions", "retain", "same", "60", "--tenant", RED)
        assert kept.code == 0
        assert "accepted" in kept.out
        assert ask("sessions", "show", "same", "--tenant", RED, "--json").json["retained_until"] is not None
        assert ask("sessions", "retain", "same", "-1", "--tenant", RED).code == 2
        assert ask("sessions", "prefetch", "a/b %").out.split() == ["blocks", "0"]
        assert ask("sessions", "release", "same", "--tenant", RED).out.split() == ["id", "same", "released", "true"]
        assert ask("sessions", "release", "unknown").code == 1
        assert [one["id"] for one in ask("requests", "--session", "a*", "--json").json["items"]] == ["r0"]
        rule = ask("rules", "set", "agents", "priority=high", "--session", "agent-*", "--json").json
        assert rule["match"]["session"] == "agent-*"
        dropped = ask("reset", "--session", "same", "--json").json
        assert dropped["dropped_blocks"] == 16
        service.settle_history()
        assert "same" in ask("evictions", "--limit", "1").out
