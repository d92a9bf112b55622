"""Every shell command of README and docs runs as it stands, against a live service, or as far as it can run here."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.commands import run_command, start_command
from tests.harness.debian import installed
from tests.harness.service_process import ROOT, Served, environment, serving
from tests.harness.waiting import DEADLINE_S, wait_until

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    *("curl", "docker", "grep", "kubectl", "kvferry", "make", "openssl", "pip", "printf", "promtool", "python"),
    *("python3", "sqlite3", "vllm"),
)
SHELL = re.compile(rf"export \w+=|(?:\w+=\S+ )*(?:try/bin/|\.venv/bin/)?(?:{'|'.join(PROGRAMS)})\b")
NOT_RUN = {
    "docker": "no Docker daemon here: tests/deploy/test_compose.py validates the files",
    "kubectl": "no cluster here: tests/deploy/test_kubernetes.py renders and validates the manifests",
    "vllm serve": "needs vLLM and a model: tests/vllm/test_docs.py has the configurations accepted",
    "vllm bench": "needs vLLM: tests/vllm/test_bench.py runs it",
    "python3 -m venv try": "for vLLM: tests/vllm/test_docs.py runs the script in an environment that has it",
    "try/bin/pip": "as before",
    "VLLM_CPU_KVCACHE_SPACE": "as before",
    "OMP_NUM_THREADS=1 PYTHONPATH": "needs vLLM, and takes an hour",
    "KVFERRY_DATABASE_URL=postgresql": "needs its server: tests/store runs against PostgreSQL",
}
"""Beginnings of commands, and why they do not run here."""
SHORT = ("quickstart.md",)
"""Pages of the short suite."""


def blocks(page: str) -> Iterator[list[str]]:
    """The blocks of code of a page, without their indentation."""
    lines = iter(f"{page}\n".splitlines())
    before = ""
    for line in lines:
        if line.startswith("```"):
            yield [*iter(lines.__next__, "```")]
        elif line.startswith("    ") and not before.strip():
            block = [line]
            block += [*iter(lines.__next__, "")]
            yield [one.strip() if line.startswith("      ") else one[4:] for one in block]
            line = ""
        before = line


def commands(block: list[str]) -> Iterator[str]:
    """The commands of a block in shell; those that go on in the next line are one."""
    if not SHELL.match(block[0]):
        return
    command = ""
    for line in block:
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:
            command += "\n"
            continue
        if not command.endswith("\\"):
            yield command
            command = ""
        else:
            command = command[:-1]
    assert not command, f"{command} does not end"


def documented() -> list[tuple[Path, list[str]]]:
    found = [(page, [one for block in blocks(page.read_text()) for one in commands(block)]) for page in PAGES]
    return [(page, ones) for page, ones in found if ones]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        for name in ("ID", "my-first"):
            running.complete("Once upon a time", request_id=name, session_id="ID")
        yield running


def write_trace(path: Path, conversations: int, turns: int) -> None:
    """Conversations that take turns, each prompt being the one before and more."""
    rng = random.Random(11)
    next_id = iter(range(1, 10_000))
    histories: list[list[int]] = [[0] for _ in range(conversations)]
    with path.open("w") as trace:
        for turn in range(turns):
            for number, history in enumerate(histories):
                history += [next(next_id) for _ in range(rng.randint(3, 8))]
                tokens = len(history) * 512 - rng.randint(0, 511)
                line = {"timestamp": turn * 1000 + number, "input_length": tokens, "output_length": 100}
                trace.write(json.dumps(line | {"hash_ids": history}) + "\n")


class Shell:
    """Runs commands in a folder that looks like a checkout: `kvferry` as a process, other programs by `sh`."""

    def __init__(self, folder: Path, served: Served) -> None:
        self._folder = folder
        self._served = served
        self._env = environment(folder, {"url": served.url})
        # Without tokens, tiers that the pages attach must be below this.
        self._mounts = Path(served.get("/admin/v1/config")["state_dir"]["value"]) / "tiers"
        self._mounts.mkdir(exist_ok=True)
        programs = folder / "programs"
        programs.mkdir()
        # Commands that need root run as it or not at all. Of vLLM's, only the words are checked.
        for name, script in {
            "sudo": 'exec "$@"',
            "vllm": 'case "$*" in *KVFerryConnector*) ;; *) exit 1;; esac',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        self._env["PATH"] = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        for name in ("app", "docs"):
            (folder / name).symlink_to(ROOT / name)
        write_trace(folder / "trace.jsonl", conversations=3, turns=2)
        (folder / "sessions").mkdir()
        turns = [{"t": at, "in": 80, "out": 4, "hash_ids": [1], "think_time": 0.1} for at in range(2)]
        (folder / "sessions" / "one.json").write_text(json.dumps({"block_size": 64, "requests": turns}))
        (folder / "kvferry.db").touch()

    def run(self, command: str) -> None:
        command = command.replace("http://127.0.0.1:8787", self._served.url).replace("/mnt/", f"{self._mounts}/")
        words = shlex.split(command, comments=True)
        given = [word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word)]
        words = words[len(given) :] if words[0] != "export" else words
        if words[0] == "export":
            self._env |= dict(given)
        elif words[0] == "make":
            self._check(subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True))
        elif words[0] == "pip":
            check_requirement(words[-1])
        elif words[:2] == ["kvferry", "record"]:
            self._record(words[1:])
        elif words[0] == "kvferry" and not set(words) & {"|", ">"}:
            # Starting with these settings is what `serve` of the fixture does with others.
            words = ["config", "check"] if words[1] == "serve" else words[1:]
            env = self._env | dict(given)
            self._check(run_command(words, env, self._folder, DEADLINE_S))
        else:
            shell = ["sh", "-c", command]
            self._check(subprocess.run(shell, cwd=self._folder, env=self._env, capture_output=True, text=True))

    def _record(self, words: list[str]) -> None:
        log = self._folder / "record.log"
        with log.open("w") as file:
            command = start_command([*words, "--requests", "1"], self._env, self._folder, file, file)
        try:
            wait_until(lambda: command.poll() is not None or "recording to" in log.read_text(), "recording")
            self._served.complete("Once upon a time")
            assert command.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            command.kill()

    def _check(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"


def check_requirement(requirement: str) -> None:
    """Installing needs an index of packages; what can be wrong here is the name of an extra."""
    extra = re.fullmatch(r"\.|kvferry\[(\w+)\]", requirement)
    assert extra is not None, requirement
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra[1] is None or extra[1] in project["optional-dependencies"]


@pytest.mark.parametrize(
    ("page", "given"),
    [
        pytest.param(page, given, id=page.name, marks=[] if page.name in SHORT else [pytest.mark.long])
        for page, given in documented()
    ],
)
def test_commands_of_a_page_run_in_their_order(page: Path, given: list[str], served: Served, tmp_path: Path) -> None:
    shell = Shell(tmp_path, served)
    if page.name == "what-if.md":
        shell.run("kvferry config set what_if=true")
    for command in given:
        if command.startswith("curl "):
            installed("curl", "curl")
        if not command.startswith(tuple(NOT_RUN)):
            shell.run(command)


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    given = [command for _, commands in documented() for command in commands]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in given)] == []
    assert len(given) > 40


def test_log_lines_of_the_quickstart_are_in_the_log(served: Served) -> None:
    """LMCache#2901, LMCache#1399, sglang#14282: a size was per rank here and in total there."""
    lines = re.findall(r"^    \.\.\. INFO  (.*)$", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE)
    assert len(lines) == 3
    log = served.log()
    assert [line for line in lines if line.replace("http://127.0.0.1:8787", served.url) not in log] == []
