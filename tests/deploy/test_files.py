"""Alerts, dashboard and the operator's guide agree with each other and with the metrics."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kvferry.app.settings import Settings
from kvferry.app.settings.fields import SETTING_NAMES
from kvferry.core.policy import POLICY_FIELDS
from tests.deploy.conftest import PROMETHEUS, ROOT, alerts, dashboard, panel_queries
from tests.harness.debian import installed

GUIDE = (ROOT / "docs" / "operating.md").read_text()
METRIC = re.compile(r"(?<![\w:.])(?:kvferry|process)_(?:[a-z0-9_]+\*?|\*)")
Families = dict[str, set[str]]


def named_metrics(text: str) -> set[str]:
    return set(METRIC.findall(text))


@pytest.mark.parametrize(
    "command",
    [("check", "rules", "alerts.yml"), pytest.param(("test", "rules", "alerts_test.yml"), marks=pytest.mark.long)],
)
def test_rules_and_their_unit_tests_pass_by_promtool(command: tuple[str, ...]) -> None:
    promtool = installed("promtool", "prometheus")
    done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_configuration_is_valid_by_promtool(tmp_path: Path) -> None:
    promtool = installed("promtool", "prometheus")
    for name in ("prometheus.yml", "alerts.yml"):
        (tmp_path / name).write_text((PROMETHEUS / name).read_text())
    (scrape,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    (tmp_path / scrape["authorization"]["credentials_file"]).write_text("token")
    done = subprocess.run([promtool, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_unit_test_and_a_section() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    names = [alert["alert"] for alert in alerts()]
    assert [test["name"] for test in tests if "name" in test] == names
    assert re.findall(r"^## (KVFerry\w+)$", GUIDE, re.MULTILINE) == names
    for alert in alerts():
        name, notes = alert["alert"], alert["annotations"]
        assert notes["runbook_url"] == f"docs/operating.md#{name.lower()}"
        assert notes["summary"]
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        section = GUIDE.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert "- Change: " in section or name in ("KVFerryNotReady", "KVFerryDegraded"), (
            "these list what to do by reason"
        )


def test_metrics_in_dashboard_alerts_and_documentation_exist(families: Families) -> None:
    samples = set().union(*families.values(), families, {f"{name}_bucket" for name in families})
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "deploy").rglob("*.*")]
    # Tools that import parts of `deploy` leave bytecode there.
    pages = [page for page in pages if page.suffix != ".pyc"]
    unknown = {
        (page.name, name)
        for page in pages
        for name in named_metrics(page.read_text())
        if not (any(one.startswith(name[:-1]) for one in samples) if name.endswith("*") else name in samples)
    }
    assert unknown == set()


def test_guide_names_every_metric(families: Families) -> None:
    table = GUIDE.split("\n## Metrics\n")[1]
    named = named_metrics(table)
    patterns = tuple(name[:-1] for name in named if name.endswith("*"))
    left = [name for name, samples in families.items() if not ({name, *samples} & named or name.startswith(patterns))]
    assert left == []


def test_guide_names_settings_that_exist() -> None:
    for name in re.findall(r"KVFERRY_([A-Z_]+)", GUIDE):
        assert name.lower() in SETTING_NAMES, name


def test_changes_that_the_guide_proposes_are_possible() -> None:
    settings = Settings(_env_file=None)
    changes = re.findall(r"`kvferry (config|policy) set (\w+)=([^`.]+)`", GUIDE)
    assert len(changes) > 8
    for what, name, value in changes:
        if what == "config":
            settings.change({name: value})
        else:
            assert name in POLICY_FIELDS or (name, value) == ("FIELD", "null")


def test_dashboard_is_one_that_grafana_imports() -> None:
    board = dashboard()
    panels = board["panels"]
    assert board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (grid["x"] + x, grid["y"] + y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["w"])
        for y in range(grid["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert [variables[name]["type"] for name in ("datasource", "engine", "instance")] == [
        "datasource",
        "query",
        "query",
    ]
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            assert '=~"$instance"' in target["expr"]


def test_panels_of_the_guide_exist() -> None:
    titles = {title for title, _ in panel_queries()}
    quoted = set(re.findall(r'"([A-Z][^"]+)"', GUIDE))
    assert quoted <= titles


def test_links_within_the_guide_exist() -> None:
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", GUIDE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= headings
