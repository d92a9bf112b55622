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
