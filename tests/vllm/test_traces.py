"""Traces of vLLM's requests, as an OpenTelemetry collector receives them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.harness.collector import collecting
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.workload import BLOCK, Prompt, random_tokens

PARENT = "00f067aa0ba902b7"


def run(engine: InProcess, name: str, prompt: Prompt, trace: str | None = None, flags: str = "01") -> None:
    headers = None if trace is None else {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
    asked = {"prompt_token_ids": prompt}
    engine.engine.add_request(name, asked, engine.sampling(4), trace_headers=headers)
    next(done for done in itertools.count() if engine.step())
    engine.settle()


def test_spans_of_a_hit_continue_the_trace_of_the_client(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_tokens(random.Random(1), 20 * BLOCK + 3)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        with in_process(llama, transfer_config(traces="otlp", load_decision="always")) as engine:
            run(engine, "first", prompt, "1" * 32)
            engine.forget_device()
            run(engine, "without", prompt)
            engine.forget_device()
            run(engine, "unsampled", prompt, "2" * 32, "00")
            engine.forget_device()
            run(engine, "second", prompt, "3" * 32)
        spans = {(span.trace_id[0], span.name): span for span in collector.spans}
    assert {trace for trace, _ in spans} == {"1", "3"}
    stores = [span for span in collector.spans if span.name == "kvferry.store" and span.trace_id == "1" * 32]
    assert sum(span.attributes["kvferry.blocks"] for span in stores) == 20
    request, match, load = (spans["3", f"kvferry.{name}"] for name in ("request", "match", "load"))
    assert request.parent_id == PARENT
    assert match.parent_id == load.parent_id == request.span_id
    for span in (match, load):
        assert request.began_s <= span.began_s <= span.ended_s <= request.ended_s
    assert load.attributes["kvferry.blocks"] == 20
    assert request.attributes["kvferry.prompt_tokens.host_hit"] == 20 * BLOCK
    assert request.attributes["gen_ai.request.model"] == str(llama)
