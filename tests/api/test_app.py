"""Several services in one process: they share their routes, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from httpx_sse import connect_sse

from kvferry.app.api.routes import events, stats
from tests.harness.loop_service import start_service


def test_calls_when_there_are_two_services_reach_their_own(tmp_path: Path) -> None:
    with start_service(tmp_path / "one") as one, start_service(tmp_path / "other") as other:
        assert one.shared_client.patch("/admin/v1/policy", json={"store": False}).status_code == 200
        one.shared_client.post("/admin/v1/rules", json={"name": "first", "match": {}, "policy": {"store": False}})
        one.reasons.append("no engine is attached")
        seen = [
            [
                client.get("/admin/v1/policy").json()["store"]["value"],
                len(client.get("/admin/v1/rules").json()["items"]),
                len(client.get("/admin/v1/audit").json()["items"]),
                client.get("/readyz").status_code,
                "kvferry_ready 1.0" in client.get("/metrics").text,
            ]
            for client in (one.shared_client, other.shared_client)
        ]
        one.reasons.clear()
    assert seen == [[False, 1, 2, 503, False], [True, 0, 0, 200, True]]


def test_limits_when_one_service_is_at_them_hold_for_it_alone(tmp_path: Path) -> None:
    urls = {"/admin/v1/stats/stream?interval_s=60": stats.MAX_STREAMS, "/admin/v1/events": events.MAX_WATCHERS}
    with ExitStack() as opened:
        one, other = (opened.enter_context(start_service(tmp_path / name)) for name in ("one", "other"))
        # Dropping an iterator would close its stream.
        streams = [
            opened.enter_context(connect_sse(one.shared_client, "GET", url)).iter_sse()
            for url, limit in urls.items()
            for _ in range(limit)
        ]
        for stream in streams:
            next(stream)
        seen = []
        for running in (one, other):
            answers = [opened.enter_context(running.shared_client.stream("GET", url)) for url in urls]
            seen.append([answer.status_code for answer in answers])
    assert seen == [[503, 503], [200, 200]]
