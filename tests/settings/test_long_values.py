"""Long texts from outside, made to keep a matcher of superlinear cost busy for hours, against each such matcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import typer

from kvferry.app.cli import console, rules
from kvferry.app.engines.vllm.requests import aliases_of
from kvferry.app.settings.errors import mask_url, url_passwords
from kvferry.app.settings.tiers import read_tiers
from kvferry.app.telemetry.logs import SecretMask
from kvferry.app.telemetry.traces import Traces
from kvferry.app.tiers.object.connection import unavailable
from kvferry.core.keys import RequestIdentity
from kvferry.core.rules import MAX_GLOB_CHARS, Rule, RuleMatch, RuleSet, RuleSubject

ROOT = Path(__file__).parents[2]
CHARS = 30_000
DEADLINE_S = 120.0
STARTS = ("", "s3://b/", "tcp://h:")
RUNS = ("a", "1", " ", ".", "/", "-", ":", "@", ",", "a/", "%2F", "role ")
ENDS = (" a", "\n")
TEXTS = [start + run * (CHARS // len(run)) + end for start, run, end in product(STARTS, RUNS, ENDS)]
TIERS = {
    "object": ("url", "endpoint", "account", "region"),
    "redis": ("url", "prefix"),
    "mooncake": ("master", "metadata", "devices", "host", "prefix"),
    "fs": ("name",),
}


def set_each_field_of_tiers(text: str) -> None:
    for kind, fields in TIERS.items():
        with suppress(ValueError):
            read_tiers([{"type": kind, "max_bytes": 1 << 30} | dict.fromkeys(fields, text)])


def mask_secrets(text: str) -> None:
    mask_url(text)
    url_passwords(text)
    SecretMask(["a" * 99 + "b", "%2F" * 33, "1" * 99]).apply(text)


def strip_ids(text: str) -> None:
    for start in ("cmpl-", "chatcmpl-", f"-{'a' * 32}-beam-", "1_"):
        aliases_of(start + text)


def match_globs(text: str) -> None:
    found = RuleSet()
    for number, part in enumerate(("a", "a*", "[a1]", "?", "[", "1", "-")):
        glob = ("*" + part * MAX_GLOB_CHARS)[: MAX_GLOB_CHARS - 2] + "!*"
        found.put(Rule(str(number), number, RuleMatch(request=glob), {}))
    found.first(RuleSubject(RequestIdentity(text)))


def read_spans(text: str) -> None:
    for parse in (rules._span, console.moment):
        with suppress(typer.BadParameter):
            parse(text)


def diagnose_stores(text: str) -> None:
    for start in ("", "<Code>", "kind: ", "status code: ", "(code: "):
        unavailable(RuntimeError(start + text))


def trace_calls(text: str) -> None:
    names = ("traceparent", "tracestate", "baggage")
    Traces("engine", "model").begin(dict.fromkeys(names, text), 0.0)


CASES: dict[str, Callable[[str], None]] = {
    case.__name__: case
    for case in (
        set_each_field_of_tiers,
        mask_secrets,
        strip_ids,
        match_globs,
        read_spans,
        diagnose_stores,
        trace_calls,
    )
}


@pytest.mark.parametrize("name", CASES)
def test_matching_when_texts_are_long_and_awkward_ends(name: str, clean_world: Path) -> None:
    code = f"from tests.settings.test_long_values import *; run({name!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=clean_world, env={"PYTHONPATH": str(ROOT)}, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0


def run(name: str) -> None:
    for text in TEXTS:
        CASES[name](text)
