"""Offloading that is off after repeated errors: seen in readiness, stats and metrics, and switched on by a reset."""

from __future__ import annotations

import httpx

from kvferry.app.guard import MAX_ERRORS
from tests.api.test_health import samples
from tests.harness.loop_service import Service


def offloading(client: httpx.Client) -> dict[str, object]:
    stats: dict[str, object] = client.get("/admin/v1/stats").json()["offloading"]
    return stats


def test_offloading_when_errors_repeat_is_off_until_a_whole_reset(fresh: Service) -> None:
    guard = fresh.context.guard
    with fresh.client() as client:
        assert offloading(client) == {"is_on": True, "reason": None, "num_errors": 0, "last_error": None}
        for number in range(MAX_ERRORS):
            guard.record_error("some hook", ValueError(f"number {number}"))
        seen = offloading(client)
        assert seen["is_on"] is False
        assert seen["num_errors"] == MAX_ERRORS
        assert seen["last_error"] == f"some hook: ValueError: number {MAX_ERRORS - 1}"
        fresh.degraded += guard.degraded()
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert "POST /admin/v1/reset" in ready.json()["degraded"][0]
        values = samples(client.get("/metrics").text)
        assert values["kvferry_offloading_on", ()] == 0
        assert values["kvferry_unexpected_errors_total", ()] == MAX_ERRORS
        assert client.post("/admin/v1/reset", json={"match": {"tenant": "*"}}).status_code == 200
        assert offloading(client)["is_on"] is False
        assert client.post("/admin/v1/reset", json={}).status_code == 200
        assert offloading(client) == {**seen, "is_on": True, "reason": None}
