"""The documentation as a site: it builds without a warning, loads nothing from elsewhere, and is complete."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import ROOT, alerts
from tests.harness.loop_service import start_service

CONFIG = ROOT / "deploy" / "site" / "mkdocs.yml"
GENERATED = {"endpoints.md", "messages.md", "results.md", "changelog.md"}


def pages_of_navigation() -> list[str]:
    found: list[str] = []

    def collect(entry: object) -> None:
        if isinstance(entry, str):
            found.append(entry)
        elif isinstance(entry, list):
            for one in entry:
                collect(one)
        elif isinstance(entry, dict):
            collect([*entry.values()])

    collect(yaml.safe_load(CONFIG.read_text())["nav"])
    return found


def test_navigation_has_every_page_once() -> None:
    pages = pages_of_navigation()
    assert len(set(pages)) == len(pages)
    optional = {"tuning.md"}
    assert set(pages) - GENERATED == {path.name for path in (ROOT / "docs").glob("*.md")} - optional


def test_llms_txt_has_every_page_once() -> None:
    linked = re.findall(r"\]\(([a-z-]+\.md)\)", (ROOT / "docs" / "llms.txt").read_text())
    assert sorted([*linked, "index.md"]) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_compatibility_table_has_the_versions_of_the_code() -> None:
    from kvferry.app.engines.vllm.versions import TESTED
    from kvferry.cuda_ops.persistent.format import FORMAT_VERSION

    table = (ROOT / "docs" / "upgrading.md").read_text().split("## Compatibility")[1].split("\n## ")[0]
    assert f"| vLLM | {', '.join(TESTED)} |" in table
    assert f"| format {FORMAT_VERSION} |" in table
    versions = sorted(path.name[:4] for path in (ROOT / "migrations" / "versions").glob("[0-9]*.py"))
    assert f"| {versions[0]} to {versions[-1]} |" in table


def test_page_of_log_lines_has_lines_of_the_code_only_and_once() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", CONFIG.with_name("hooks.py"))
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    logs, _ = hooks.log_lines_and_errors()

    def normal(line: str) -> str:
        line = re.sub(r"%[-+#0-9.,]*[a-z]", "...", line).replace("%%", "%")
        return re.sub(r"(?:\s*\.\.\.)+$", "", line)

    page = (ROOT / "docs" / "log-lines.md").read_text()
    listed = [normal(" ".join(found)) for found in re.findall(r"^\| (WARNING|ERROR) `([^`]+)` \|", page, re.MULTILINE)]
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) - {normal(line) for lines in logs.values() for line in lines} == set()
    assert len(listed) >= 10


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", CONFIG, "--site-dir", folder)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > len(pages_of_navigation())
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"([^\"]*)", page.read_text())
        assert loaded
        assert [url for url in loaded if re.match(r"(?:https?:)?//", url)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\W?(?:https?:)?//", sheet.read_text())


@pytest.mark.long
def test_site_has_a_runbook_at_the_anchor_of_each_alert(site: Path) -> None:
    page = (site / "operating.html").read_text()
    for alert in alerts():
        anchor = alert["annotations"]["runbook_url"].partition("#")[2]
        assert f'id="{anchor}"' in page


@pytest.mark.long
def test_site_has_every_call_and_generated_messages(site: Path, tmp_path: Path) -> None:
    with start_service(tmp_path) as service:
        paths = service.shared_client.get("/openapi.json").json()["paths"]
    endpoints = (site / "endpoints.html").read_text()
    # What is under `/v1` there belongs to the engine of that service.
    wanted = [path for path in paths if not path.startswith("/v1/")]
    assert [path for path in wanted if f" {path}</code>" not in endpoints] == []
    assert "POST /v1/chat/completions</code>" in endpoints
    messages = (site / "messages.html").read_text()
    for line in (
        "kept pool dropped, starting empty: %s",
        "offloading is switched off: %s",
        "is in use by another process",
    ):
        assert line in messages
