"""The files of `deploy/`, and the metrics that a service can have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvferry.app.api.context import KVEventCounts
from kvferry.app.api.metrics import declared
from kvferry.app.common.threads import ThreadCounts
from kvferry.app.pool.recovery import WarmStart
from kvferry.app.telemetry.traces import TraceCounts
from kvferry.core.stats import RequestCounts
from kvferry.core.tiers.base import TierCounts, TierUse
from tests.harness.loop_service import start_service

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
SELECTOR = re.compile(r"(?:kvferry|process)_[a-z_]+(?:\{[^}]*\})?|\bup\{[^}]*\}")
"""Selects what a query reads, without the range."""


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "kvferry.json").read_text())
    return found


def panel_queries() -> list[tuple[str, str]]:
    """Title of the panel and expression, of each query."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def size(text: str) -> int:
    """Return the bytes of a size as kvferry (`8GiB`), compose (`8g`, `8gb`) and Kubernetes (`8Gi`) write it."""
    found = re.fullmatch(r"(\d+)([mg])(?:b|ib?)?", text.lower())
    assert found is not None, text
    return int(found[1]) << {"m": 20, "g": 30}[found[2]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of the samples of each metric, without those of buckets."""
    with start_service(tmp_path_factory.mktemp("service")) as service:
        text = service.shared_client.get("/metrics").text
    # What only a service with tiers, a kept pool, traces, KV events, KV hints or watched threads has.
    of_tiers = [(counts, {"tier": "t"}) for counts in (TierCounts(), TierUse())]
    others = (
        WarmStart(0, 0),
        TraceCounts(0, 0),
        KVEventCounts(0),
        ThreadCounts(0, {"t": 1}),
        RequestCounts(kv_hints={"t": 1}),
    )
    more = declared([*of_tiers, *((counts, {}) for counts in others)])
    found = {family.name: {sample.name for sample in family.samples} for family in text_string_to_metric_families(text)}
    for family in more:
        suffix = "_total" if family.type == "counter" else ""
        found[family.name] = {family.name + suffix}
    return found
