"""The commands and bodies of the documentation work as they stand there."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvferry.app.cli.entry import app
from kvferry.app.telemetry.events import EventType
from kvferry.core.keys import tenant_digest
from kvferry.core.policy import POLICY_FIELDS
from kvferry.core.rules import MAX_RULES
from tests.cli.conftest import ROOT
from tests.harness.loop_service import ADMIN, Service

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGE = (ROOT / "docs" / "policies.md").read_text()
BLOCKS = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)


INLINE = sorted(
    {command for page in PAGES for command in re.findall(r"`(kvferry (?!does )[a-z][^`]*)`", page.read_text())}
)
PLACEHOLDERS = {"N": "3", "...": "3", "SIZE": "8GiB", "JSON": "{}"}


@pytest.mark.parametrize("command", INLINE)
def test_a_command_within_a_sentence_exists_with_its_options(command: str, clean_world: Path) -> None:
    (clean_world / "FILE").touch()
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command.split(" > ")[0])[1:]]
    found = typer.main.get_command(app)
    while words and hasattr(found, "commands"):
        assert words[0] in found.commands, command
        found = found.commands[words.pop(0)]
    if words:
        found.make_context(command, words)


def test_digest_of_a_salt_in_shell_is_that_of_kvferry() -> None:
    (command,) = re.findall(r"^    (printf .* cut .*)$", PAGE, re.MULTILINE)
    assert subprocess.check_output(["sh", "-c", command], text=True).strip() == tenant_digest("the salt")


@pytest.mark.parametrize(("resource", "status"), [("rules", 201), ("tenants", 200)])
def test_bodies_are_taken(service: Service, resource: str, status: int) -> None:
    blocks = [block for block in BLOCKS if f"PUT /admin/v1/{resource}/" in block]
    assert blocks
    with service.client(ADMIN) as client:
        for block in blocks:
            call, body = (line.strip() for line in block.strip().splitlines())
            answer = client.request(*call.split(), json=json.loads(body))
            assert answer.status_code == status, answer.text
            assert client.delete(call.split()[1]).status_code == 204


def test_policies_page_names_every_field_condition_and_event(service: Service) -> None:
    with service.client(ADMIN) as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    names = [*POLICY_FIELDS, *schemas["RuleMatchBody"]["properties"], *EventType, "gap", "missed"]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
    assert f"At most {MAX_RULES:,} rules" in " ".join(PAGE.split())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_documentation_lead_to_a_heading() -> None:
    others = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "bench/RESULTS.md")]
    for page in [*PAGES, *others]:
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), (page.name, target)
            assert not anchor or anchor in anchors(file), (page.name, target)


def test_files_that_the_architecture_page_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:app|core|cuda_ops|migrations|tests|bench)/[\w/.]*)`", page)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_example_of_an_own_engine_without_kvferry_says_what_to_run() -> None:
    example = ROOT / "docs" / "examples" / "own_engine.py"
    # Isolated: neither the packages of this interpreter nor the folder are searched.
    done = subprocess.run([sys.executable, "-I", "-S", example], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run `pip install .`" in done.stderr
    assert "Traceback" not in done.stderr


def test_example_of_an_own_engine_prints_what_its_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "docs" / "examples" / "own_engine.py"
    runpy.run_path(str(example), run_name="__main__")
    page = (ROOT / "docs" / "attaching.md").read_text()
    shown = re.findall(r"^    (\w: .* evicted so far)$", page, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown
    assert len(shown) == 7
