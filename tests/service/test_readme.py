"""README and quickstart run: every command of theirs for the embedded engine, against a service as they describe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.commands import run_command
from tests.harness.service_process import Served, environment, serving
from tests.service.test_replay import write_trace

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def commands(page: str, heading: str) -> list[str]:
    """The `kvferry` commands in the indented blocks under a heading."""
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^    (kvferry .*)$", section, re.MULTILINE)
    return [line.split("  #")[0].strip() for line in lines]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.mark.parametrize("command", commands(README, "A first look"))
def test_a_command_of_the_first_look_works(served: Served, tmp_path: Path, command: str) -> None:
    write_trace(tmp_path / "TRACE.jsonl", conversations=3, turns=2)
    served.complete("Once upon a time", request_id="ID")
    words = shlex.split(command)[1:]
    ended = run_command(words, environment(tmp_path, {"url": served.url}), tmp_path, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


@pytest.mark.parametrize("command", commands(QUICKSTART, "With the embedded engine"))
def test_a_command_of_the_quickstart_works(served: Served, tmp_path: Path, command: str) -> None:
    served.complete("Once upon a time", request_id="my-first")
    ended = run_command(shlex.split(command)[1:], environment(tmp_path, {"url": served.url}), tmp_path, 120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


def test_log_lines_of_the_readme_are_in_the_log(served: Served) -> None:
    """LMCache#2901, LMCache#1399, sglang#14282: a size was per rank here and in total there."""
    log = served.log()
    for line in re.findall(r"^    \.\.\. INFO  (.*)$", README, re.MULTILINE):
        said = line.replace("http://127.0.0.1:8787", served.url)
        assert said in log
