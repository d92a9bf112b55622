"""The page on vLLM: its configurations are taken, and its example prints what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.app.engines.vllm.options import read_options
from kvferry.app.settings import Source
from tests.vllm.engines import transfer_config
from vllm.config import KVTransferConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
EXTRAS = re.findall(r"^    (\{.*\})$", PAGE, re.MULTILINE)


def test_command_line_in_docs_is_accepted() -> None:
    (given,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", PAGE, re.DOTALL)
    assert read_options(KVTransferConfig(**json.loads(given))).pool_bytes == 64 << 30


def test_output_of_vllm_config_is_accepted() -> None:
    words = ("vllm-config", "--pool", "64GiB", "--tier", '{"type": "fs", "path": "/mnt/kv", "max_bytes": "1TiB"}')
    done = subprocess.run([sys.executable, "-m", "kvferry.app.cli", *words], capture_output=True, text=True, check=True)
    settings = read_options(KVTransferConfig(**json.loads(done.stdout)))
    assert (settings.pool_bytes, [tier.name for tier in settings.tiers]) == (64 << 30, ["fs"])


def test_doctor_says_that_this_vllm_sees_the_plugin() -> None:
    command = [sys.executable, "-m", "kvferry.app.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert (found["vLLM"]["state"], found["vLLM's interface"]["state"]) == ("ok", "ok")


@pytest.mark.parametrize("extra", EXTRAS)
def test_configuration_in_docs_is_accepted(extra: str) -> None:
    wanted = json.loads(extra)
    settings = read_options(KVTransferConfig(**{**transfer_config(), "kv_connector_extra_config": wanted}))
    assert {settings.source(name) for name in wanted} == {Source.CONNECTOR}


def test_docs_contain_configurations() -> None:
    assert len(EXTRAS) == 4


def test_cpu_example_in_docs_prints_the_documented_counts(tmp_path: Path) -> None:
    section = PAGE.partition("## Trying it on a CPU")[2].partition("\n## ")[0]
    ((variables, path),) = re.findall(r"^    ((?:\w+=\w+ )+)try/bin/python (\S+)$", section, re.MULTILINE)
    (found,) = re.findall(r"turn 2 found (\d+) of", section)
    example = shutil.copytree((ROOT / path).parent, tmp_path / "example") / Path(path).name
    example.write_text(example.read_text().replace('"load_decision"', '"port": 0, "load_decision"'))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVFERRY_"))}
    environment |= dict(variable.split("=") for variable in variables.split())
    environment |= {"KVFERRY_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, env=environment, input="\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "turn 1: 0 of 9600 " in done.stdout
    assert f"turn 2: {found} of 9600 " in done.stdout
