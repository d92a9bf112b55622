"""The page on vLLM: its configurations are taken, and the lines that it explains are those that are logged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig

from app.engines.vllm.options import read_options
from app.settings import Source
from tests.vllm.engines import transfer_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
EXTRAS = re.findall(r"^    (\{.*\})$", PAGE, re.MULTILINE)
LINES = re.findall(r"^\| (?:\w+ )?`([^|]*)` \|", PAGE, re.MULTILINE)


def test_the_command_line_is_taken() -> None:
    (given,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", PAGE, re.DOTALL)
    assert read_options(KVTransferConfig(**json.loads(given))).pool_bytes == 64 << 30


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_configurations_are_taken(extra: str) -> None:
    wanted = json.loads(extra)
    settings = read_options(KVTransferConfig(**{**transfer_config(), "kv_connector_extra_config": wanted}))
    assert {settings.source(name) for name in wanted} == {Source.CONNECTOR}


def test_there_are_the_configurations_that_people_need() -> None:
    assert len(EXTRAS) == 4
    assert len(LINES) > 10


@pytest.mark.parametrize("line", LINES)
def test_the_lines_are_logged_so(line: str) -> None:
    sources = " ".join(
        path.read_text() for room in ("app", "core", "cuda_ops") for path in sorted((ROOT / room).rglob("*.py"))
    )
    # Texts that are written over several lines of source are one.
    text = re.sub(r"\"\s*\n\s*f?\"", "", sources)
    for part in re.split(r"`, `", line):
        words = re.split(r"\bN\b|\bX\b|\b[FVR]\b|http://\.\.\.|\.\.\.|N%|0\.32\.x", part)
        for piece in words:
            assert piece.strip(" :=,%;") in text, piece
