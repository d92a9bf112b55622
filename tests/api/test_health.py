from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.app.api.routes.health import Probes
from kvferry.app.guard import MAX_ERRORS
from tests.harness.debian import installed
from tests.harness.http_server import DEADLINE_S
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service

DOCUMENTS = ("/healthz", "/readyz", "/health", "/version", "/metrics")
READY = {"ready": True, "reasons": [], "degraded": []}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def readiness_metrics(client: httpx.Client) -> tuple[float, ...]:
    found = samples(client.get("/metrics").text)
    return tuple(found[f"kvferry_{name}", ()] for name in ("ready", "not_ready_reasons", "degraded_reasons"))


@pytest.fixture
def unready(service: Service) -> Iterator[httpx.Client]:
    """A client of `service`, which is not ready meanwhile."""
    service.reasons.append("no engine is attached")
    yield service.shared_client
    service.reasons.clear()


def test_healthz_answers(api: httpx.Client) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "path",
    [*DOCUMENTS, "/", "/ui", "/ui/", "/ui/app.js", "/ui/nothing.js", "/docs", "/docs/swagger-ui.css", "/openapi.json"],
)
def test_head_of_a_document_is_its_headers(unready: httpx.Client, path: str) -> None:
    headers = {"X-Request-ID": "one", "Accept-Encoding": "identity"}
    got, head = (unready.request(method, path, headers=headers, follow_redirects=False) for method in ("GET", "HEAD"))
    # A scrape counts the calls before it.
    varying = {"date", *(["content-length"] if path == "/metrics" else [])}
    assert head.status_code == got.status_code
    assert {k: v for k, v in head.headers.items() if k not in varying} == {
        k: v for k, v in got.headers.items() if k not in varying
    }
    assert head.content == b""


def test_readyz_when_not_ready_is_503_with_reasons(fresh: Service, client: httpx.Client) -> None:
    """LMCache on CPU: a connector failed to start, and the engine ran on without a word."""
    assert (client.get("/readyz").status_code, client.get("/readyz").json()) == (
        200,
        READY,
    )
    fresh.reasons.append("no engine is attached")
    for path in ("/readyz", "/health"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (
            503,
            {"ready": False, "reasons": ["no engine is attached"], "degraded": []},
        )
    fresh.reasons.clear()
    assert client.get("/readyz").status_code == client.get("/health").status_code == 200


def test_version_when_asked_is_that_of_the_api(api: httpx.Client) -> None:
    assert api.get("/version").json() == {"version": api.get("/openapi.json").json()["info"]["version"]}


def test_readyz_when_degraded_is_200_with_reasons(fresh: Service, client: httpx.Client) -> None:
    """A tier is optional: without it requests are served, and a fleet that lost one shared disk must not go dark."""
    fresh.degraded.append("tier disk: the disk is full")
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, READY | {"degraded": ["tier disk: the disk is full"]})
    assert readiness_metrics(client) == (1, 0, 1)
    fresh.degraded.clear()
    assert client.get("/readyz").json() == READY
    assert readiness_metrics(client) == (1, 0, 0)
    fresh.reasons.append("no engine is attached")
    assert readiness_metrics(client) == (0, 1, 0)
    fresh.reasons.clear()


def test_readiness_when_its_check_hangs_has_that_reason(fresh: Service, client: httpx.Client) -> None:
    async def check() -> None:
        probes = Probes(fresh.context)
        for _ in range(3):
            found = await probes.readiness(0.05)
            assert not found.ready
            assert "did not end" in found.reasons[0]
        assert client.get("/healthz").status_code == 200
        assert samples(client.get("/metrics").text)["kvferry_ready", ()] == 0, "a scrape does not wait for it either"
        fresh.may_answer.set()
        assert (await probes.readiness(DEADLINE_S)).ready

    fresh.may_answer.clear()
    asyncio.run(check())
    client.get("/readyz")
    assert client.get("/readyz").json() == READY


def test_metrics_equal_stats(fresh: Service, client: httpx.Client) -> None:
    for number in range(4):
        fresh.engine.answer(LoopRequest(f"r{number}", 160, seed=number % 2, num_output_tokens=32))
        fresh.settle()
    fresh.settle_history()
    stats = client.get("/admin/v1/stats").json()
    answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    found = samples(answer.text)
    one = {name: value for (name, labels), value in found.items() if not labels}
    by_label = {(name, labels[0][1]): value for (name, labels), value in found.items() if len(labels) == 1}
    assert one["kvferry_store_offered_blocks_total"] == stats["store"]["offered"] > 0
    assert one["kvferry_store_stored_blocks_total"] == stats["store"]["stored"] > 0
    assert one["kvferry_store_bytes_total"] == stats["store"]["bytes"]
    assert one["kvferry_load_blocks_total"] == stats["load"]["blocks"] > 0
    assert one["kvferry_requests_seen_total"] == 4
    for reason, count in stats["store"]["skipped"].items():
        assert by_label[("kvferry_store_skipped_blocks_total", reason)] == count
    for state in ("free", "ready", "storing"):
        assert by_label[("kvferry_pool_slots", state)] == stats["pool"][state]
    assert by_label[("kvferry_prompt_tokens_total", "host")] == stats["prompt_tokens"]["host_hit"] > 0
    assert by_label[("kvferry_prompt_tokens_total", "recomputed")] == stats["prompt_tokens"]["recomputed"]
    assert one["kvferry_journal_dropped_total"] == 0
    total = stats["balance"]["total"]
    assert one["kvferry_balance_gain_seconds_total"] == (total["gain_s"] or 0)
    assert by_label[("kvferry_balance_cost_seconds_total", "load_waits")] == total["load_wait_s"] > 0
    assert by_label[("kvferry_balance_cost_seconds_total", "hooks")] == total["hook_s"]
    assert one["kvferry_balance_paused"] == 0
    for direction in ("store", "load"):
        jobs = by_label[("kvferry_transfer_job_bytes_count", direction)]
        assert by_label[("kvferry_transfer_job_seconds_count", direction)] == jobs > 0
        assert by_label[("kvferry_transfer_job_bytes_sum", direction)] == stats[direction]["bytes"] > 0
        assert by_label[("kvferry_transfer_job_seconds_sum", direction)] == pytest.approx(stats[direction]["seconds"])
        buckets = {
            float(dict(labels)["le"]): value
            for (name, labels), value in found.items()
            if name == "kvferry_transfer_job_bytes_bucket" and dict(labels)["direction"] == direction
        }
        # Blocks of 4 KiB, of which no job here has more than a hundred.
        assert buckets[2.0**20] == buckets[float("inf")] == jobs
        assert sorted(buckets.values()) == [buckets[bound] for bound in sorted(buckets)]
    client.post("/admin/v1/reset")
    dropped = samples(client.get("/metrics").text)[("kvferry_evictions_total", (("reason", "reset"),))]
    stats = client.get("/admin/v1/stats").json()
    assert dropped == stats["evictions"]["by_reason"]["reset"] > 0


def test_metric_names_and_labels_do_not_depend_on_traffic(fresh: Service, client: httpx.Client) -> None:
    before = set(samples(client.get("/metrics").text))
    for number in range(20):
        fresh.engine.answer(LoopRequest(f"made-up-{number}", 64, seed=number, tenant=f"t{number}", lora=f"l{number}"))
        client.put(f"/admin/v1/requests/made-up-{number}/policy", json={"store": False})
        rule = {"name": f"made-up-{number}", "match": {"lora": f"l{number}"}, "policy": {"store": False}}
        assert client.post("/admin/v1/rules", json=rule).status_code == 201
    client.post("/admin/v1/reset")
    text = client.get("/metrics").text
    assert set(samples(text)) == before
    assert "made-up" not in text
    for name, _ in before:
        assert re.fullmatch(r"(kvferry|process)_[a-z0-9_]+", name), name


def test_metrics_name_the_versions_and_the_process(api: httpx.Client) -> None:
    found = samples(api.get("/metrics").text)
    (build,) = (dict(labels) for name, labels in found if name == "kvferry_build_info")
    assert build.keys() == {"version", "engine", "engine_version", "python"}
    assert (build["version"], build["engine"]) == (api.get("/openapi.json").json()["info"]["version"], "embedded")
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert found[f"process_{name}", ()] > 0
        assert found[f"kvferry_process_{name}", ()] > 0


def test_metrics_name_the_settings_in_use(client: httpx.Client) -> None:
    client.patch("/admin/v1/config", json={"store_threshold": 2})
    (config,) = (dict(labels) for name, labels in samples(client.get("/metrics").text) if name == "kvferry_config_info")
    assert (config["store_threshold"], config["max_offload_tokens"], config["pool_bytes"]) == ("2", "unlimited", "1GiB")


def test_metrics_are_clean_by_promtool(fresh: Service, client: httpx.Client) -> None:
    promtool = installed("promtool", "prometheus")
    fresh.engine.answer(LoopRequest("r", 64))
    text = client.get("/metrics").text
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_metrics_when_openmetrics_is_accepted_are_openmetrics(api: httpx.Client) -> None:
    answer = api.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("version", ["x", "1.x", "-", "1.0.y"])
def test_metrics_when_an_unreadable_version_is_accepted_are_text(api: httpx.Client, version: str) -> None:
    answer = api.get("/metrics", headers={"Accept": f"application/openmetrics-text;version={version}"})
    assert (answer.status_code, answer.headers["Content-Type"].startswith("text/plain")) == (200, True)


def test_offloading_when_errors_repeat_is_off_until_a_whole_reset(fresh: Service, client: httpx.Client) -> None:
    guard = fresh.context.guard

    def offloading() -> dict[str, object]:
        stats: dict[str, object] = client.get("/admin/v1/stats").json()["offloading"]
        return stats

    assert offloading() == {"is_on": True, "reason": None, "num_errors": 0, "last_error": None}
    for number in range(MAX_ERRORS):
        guard.record_error("some hook", ValueError(f"number {number}"))
    seen = offloading()
    assert seen["is_on"] is False
    assert str(seen["reason"]).endswith("see the log, then POST /admin/v1/reset")
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
    assert offloading()["is_on"] is False
    assert client.post("/admin/v1/reset", json={}).status_code == 200
    assert offloading() == {**seen, "is_on": True, "reason": None}


def test_offloading_when_disabled_is_off_whatever_is_reset(fresh: Service, client: httpx.Client) -> None:
    fresh.context.guard.disable("the pool's file was truncated; start the engine again")
    assert client.post("/admin/v1/reset", json={}).status_code == 200
    offloading = client.get("/admin/v1/stats").json()["offloading"]
    assert (offloading["is_on"], offloading["num_errors"]) == (False, 0)
    assert offloading["reason"] == "the pool's file was truncated; start the engine again"
