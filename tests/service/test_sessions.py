"""Sessions of the embedded engine's clients, from the body or a header to a reset after a kill, and in a tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.core.keys import tenant_digest
from tests.harness.service_process import Served, serving
from tests.harness.stores import shell
from tests.harness.waiting import wait_until
from tests.service.test_restart import PROMPTS, kept, kill
from tests.service.test_tiers import disk, settings, settle
from tests.service.test_tiers import prompt_of as tier_prompt

LONGEST = "é/%" + "x" * 253
SESSIONS = "/admin/v1/sessions"


def complete(served: Served, number: int, header: str | None = None, **body: Any) -> None:
    sent = {"prompt": PROMPTS[number], "max_tokens": 1, **body}
    headers = {} if header is None else {"X-Session-ID": header}
    served.http.post("/v1/completions", json=sent, headers=headers).raise_for_status()


def blocks_of(served: Served) -> dict[str | None, int]:
    """The number of blocks in the pool by session."""
    found: dict[str | None, int] = {}
    for one in served.get("/admin/v1/blocks?limit=1000")["items"]:
        found[one["session"]] = found.get(one["session"], 0) + 1
    return found


def test_sessions_are_readable_at_once_and_dropped_after_a_kill(tmp_path: Path) -> None:
    with kept(tmp_path) as served:
        complete(served, 0, header="of-header")
        complete(served, 1, header="of-header", session_id=LONGEST)
        assert [one["id"] for one in served.get(SESSIONS)["items"]] == [LONGEST, "of-header"]
        complete(served, 2, session_id="same", cache_salt="red")
        complete(served, 3, session_id="same", cache_salt="blue")
        complete(served, 4, session_id="x" * 257)
        chat = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 1}
        answer = served.http.post("/v1/chat/completions", json=chat, headers={"X-Session-ID": "of-header"})
        assert answer.status_code == 200
        served.settle()
        listed = served.get(SESSIONS)["items"]
        red, blue = tenant_digest("red"), tenant_digest("blue")
        assert [(one["id"], one["tenant"], one["requests"]) for one in listed] == [
            ("of-header", None, 2),
            ("same", blue, 1),
            ("same", red, 1),
            (LONGEST, None, 1),
        ]
        assert served.stats()["requests"]["ignored_sessions"] == 1
        one = served.get(f"{SESSIONS}/same?tenant={red}")
        assert (one["num_tokens"], one["pool"]) == (160, 160)
        assert served.http.get(f"{SESSIONS}/same").status_code == 409
        before = blocks_of(served)
        assert before.keys() == {LONGEST, "of-header", "same", None}
        # A block without a row would be of an unknown request, which each reset by match drops.
        rows = "SELECT session, count(*) FROM slots GROUP BY session"
        wait_until(lambda: dict(shell(tmp_path / "kvferry.db", rows)) == before, "the rows are written")
        kill(served)
    with kept(tmp_path) as served:
        assert served.get(SESSIONS)["items"] == []
        # A kill may lose slots that are not sealed yet.
        recovered = blocks_of(served)
        assert 0 < recovered["same"] <= before["same"]
        dropped = served.http.post("/admin/v1/reset", json={"match": {"session": "sam?"}}).json()
        assert (dropped["epoch"], dropped["dropped_blocks"]) == (0, recovered.pop("same"))
        assert blocks_of(served) == recovered


def test_session_in_a_private_tier_is_prefetched_and_dropped_alone(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with serving(tmp_path / "one", **settings(folder)) as served:
        for number, session in enumerate(["mine", "other", None]):
            body = {"prompt": tier_prompt(number), "max_tokens": 2, "session_id": session}
            served.http.post("/v1/completions", json=body).raise_for_status()
        settle(served)
        served.http.post("/admin/v1/reset", json={"tiers": ["host"]}).raise_for_status()
        held = served.get(f"{SESSIONS}/mine")
        assert (held["pool"], held["tiers"]["disk"]) == (0, held["num_tokens"])
        begun = served.http.post(f"{SESSIONS}/mine/prefetch", json={"tiers": ["disk"]})
        assert (begun.status_code, begun.json()) == (202, {"num_blocks": 15})
        wait_until(lambda: served.get(f"{SESSIONS}/mine")["pool"] == held["num_tokens"], "they are in the pool")
        assert blocks_of(served) == {"mine": 15}, "promoted blocks keep their session"
        settle(served)
        assert served.http.post(f"{SESSIONS}/mine/prefetch", json={"tiers": ["none"]}).status_code == 422
        # Sizes of a tier are read at intervals.
        wait_until(lambda: disk(served)["blocks"] == 3 * 15, "those of all prompts are counted")
        dropped = served.http.post("/admin/v1/reset", json={"match": {"session": "mine"}}).json()
        assert dropped["tiers"]["disk"]["dropped"] == "matching"
        wait_until(lambda: disk(served)["blocks"] == 2 * 15, "those of the session are gone")
        assert served.get(f"{SESSIONS}/mine")["tiers"] == {"disk": 0}
