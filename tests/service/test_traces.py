"""Traces of requests, as an OpenTelemetry collector receives them from a service process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.app.serve.preflight import start_problems
from kvferry.app.settings import Settings
from kvferry.app.telemetry.traces import MAX_STAGES, TraceCounts, Traces
from kvferry.core.scheduler.requests import StageKind, TraceStage
from tests.harness.collector import Collector, collecting
from tests.harness.service_process import Served, serving
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_requests import request as toy_request
from tests.harness.waiting import wait_until

BLOCK = 16
PARENT = "00f067aa0ba902b7"
SECRET = "Bearer-collector-secret"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, collector)
        patch.setenv("OTEL_SERVICE_NAME", "cache-of-tests")
        settings = {"device_blocks": 90, "pool_bytes": "64MiB", "load_decision": "always", "traces": "otlp"}
        with serving(tmp_path_factory.mktemp("served"), **settings) as running:
            yield running


def set_variables(patch: pytest.MonkeyPatch, collector: Collector) -> None:
    patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={SECRET}")
    patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def ask(served: Served, name: str, blocks: int, *, trace: str | None = None, flags: str = "01", **body: object) -> None:
    """Send a request, with the trace context of a client where a trace id is given."""
    sent = {"prompt": [5] * (blocks * BLOCK + 2), "max_tokens": 2, "ignore_eos": True} | body
    headers = {"X-Request-ID": name}
    if trace is not None:
        headers |= {"traceparent": f"00-{trace}-{PARENT}-{flags}", "tracestate": "vendor=1"}
    answer = served.http.post("/v1/completions", json=sent, headers=headers)
    assert answer.status_code == 200, answer.text


def num_spans(served: Served, result: str) -> float:
    """The spans that the service counts."""
    found = re.search(rf'kvferry_trace_spans_total{{result="{result}"}} (\S+)', served.http.get("/metrics").text)
    assert found is not None
    return float(found[1])


def test_spans_of_a_hit_continue_the_trace_of_the_client(served: Served, collector: Collector) -> None:
    ask(served, "first", 20, trace="1" * 32)
    store = collector.wait_for("kvferry.store", "first")
    assert store.attributes["kvferry.blocks"] == 20
    assert store.attributes["kvferry.bytes"] == served.stats()["store"]["bytes"]
    for number in range(4):
        ask(served, f"other-{number}", 30, prompt=[6 + number] * 480, kv_transfer_params={"store": False})
    ask(served, "second", 20, trace="2" * 32)
    request, match, load = (collector.wait_for(f"kvferry.{name}", "second") for name in ("request", "match", "load"))
    assert {span.trace_id for span in (request, match, load)} == {"2" * 32}
    assert request.parent_id == PARENT
    assert match.parent_id == load.parent_id == request.span_id
    assert request.trace_state == load.trace_state == "vendor=1"
    for span in (match, load):
        assert request.began_s <= span.began_s <= span.ended_s <= request.ended_s
    assert match.ended_s <= load.began_s < load.ended_s
    assert (load.attributes["kvferry.blocks"], load.attributes["kvferry.tokens"]) == (20, 20 * BLOCK)
    assert match.attributes["kvferry.tokens"] == 20 * BLOCK
    about = served.get("/admin/v1/requests/second")
    named = request.attributes
    assert (named["gen_ai.request.model"], named["gen_ai.usage.input_tokens"]) == ("tiny", 20 * BLOCK + 2)
    assert (named["gen_ai.usage.cache_read.input_tokens"], named["gen_ai.usage.output_tokens"]) == (20 * BLOCK, 2)
    assert (named["kvferry.prompt_tokens.host_hit"], named["kvferry.missed_tokens.tail"]) == (20 * BLOCK, 2)
    assert named["kvferry.load_s"] == pytest.approx(about["load_s"], abs=1e-3)
    assert named["kvferry.load_s"] > 0
    assert 0 < named["kvferry.first_token_s"] <= request.ended_s - request.began_s
    assert request.resource["service.name"] == "cache-of-tests"
    assert collector.headers[0]["authorization"] == SECRET
    assert SECRET not in served.log()


def test_requests_that_the_client_does_not_sample_have_no_spans(served: Served, collector: Collector) -> None:
    ask(served, "unsampled", 3, trace="3" * 32, flags="00")
    ask(served, "malformed", 3, trace="not-a-trace")
    served.settle()
    ask(served, "sampled", 3, trace="4" * 32)
    collector.wait_for("kvferry.request", "sampled")
    assert not [span for span in collector.spans if span.trace_id == "3" * 32]
    (alone,) = collector.named("kvferry.request", "malformed")
    assert alone.parent_id == ""


def test_prompts_of_one_call_have_spans_of_the_same_parent(served: Served, collector: Collector) -> None:
    ask(served, "call", 1, trace="5" * 32, prompt=["words of a prompt", "other words"])
    for name in ("call-0", "call-1"):
        collector.wait_for("kvferry.request", name)
    requests = [span for span in collector.spans if span.name == "kvferry.request" and span.trace_id == "5" * 32]
    assert {span.parent_id for span in requests} == {PARENT}
    assert len({span.span_id for span in requests}) == 2
    assert "words" not in str(collector.spans)


def test_spans_that_a_collector_refuses_are_counted_and_reported(served: Served, collector: Collector) -> None:
    collector.status = 401
    ask(served, "refused", 3)
    wait_until(lambda: num_spans(served, "dropped") > 0, "spans are dropped")
    for number in range(3):
        ask(served, f"refused-{number}", 3)
    answer = served.http.get("/readyz")
    assert answer.status_code == 200
    assert re.search("traces: spans cannot be sent: .*401.*OTEL_EXPORTER_OTLP_", *answer.json()["degraded"])
    collector.status = 200
    ask(served, "taken", 3)
    collector.wait_for("kvferry.request", "taken")
    wait_until(lambda: served.http.get("/readyz").json()["degraded"] == [], "not degraded any more")
    assert served.log().count("traces: spans cannot be sent") == 1
    # The collector has received the last ones before they count as exported.
    wait_until(lambda: num_spans(served, "exported") == len(collector.spans), "all are counted")


def test_stop_sends_the_last_spans(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, collector)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with serving(tmp_path, traces="otlp") as served:
        ask(served, "last", 3)
        assert served.stop() == 0
    assert collector.named("kvferry.request", "last")


@pytest.mark.parametrize("is_down", [True, pytest.param(False, marks=pytest.mark.long)])
def test_collector_that_does_not_answer_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_down: bool
) -> None:
    with collecting() as silent:
        silent.may_answer.clear()
        set_variables(monkeypatch, silent)
        if is_down:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization {SECRET}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
        with serving(tmp_path, traces="otlp") as served:
            for number in range(6):
                ask(served, f"r{number}", 2)
            wait_until(lambda: num_spans(served, "dropped") > 0, "spans are dropped")
            wait_until(lambda: served.http.get("/readyz").json()["degraded"] != [], "degraded")
            ask(served, "served", 2)
            assert num_spans(served, "exported") == 0
            assert served.stop() == 0
        assert served.log().count("traces: spans cannot be sent") == 1
        assert not re.search(f"Traceback|ERROR|{SECRET}", served.log())


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: .*TRACES_PROTOCOL=http/protobuf"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1", "OTEL_BSP_MAX_QUEUE_SIZE=-1: not a positive whole number"),
    ],
)
def test_variable_that_traces_cannot_honour_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert start_problems(Settings(_env_file=None, engine="none", traces="off")) == []
    (problem,) = start_problems(Settings(_env_file=None, engine="none", traces="otlp"))
    assert re.search(message, problem)


def test_traces_without_their_packages_refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", None)
    monkeypatch.delitem(sys.modules, "kvferry.app.telemetry.traces", raising=False)
    assert start_problems(Settings(_env_file=None, engine="none")) == []
    (problem,) = start_problems(Settings(_env_file=None, engine="none", traces="otlp"))
    assert re.match(r"KVFERRY_TRACES=otlp: opentelemetry\S* is not installed; pip install 'kvferry\[otel\]'", problem)


def test_spans_of_one_request_beyond_the_limit_are_omitted_and_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, collector)
    monkeypatch.setattr(collector, "spans", [])
    traces = Traces("engine", "model")
    call = traces.begin({"traceparent": f"00-{'6' * 32}-{PARENT}-01"}, 1000.0)
    assert call is not None
    engine, many = ToyEngine(num_slots=8, num_blocks=8), toy_request("many", 1)
    many.trace = traced = call.request()
    assert traced is not None
    for number in range(MAX_STAGES + 6):
        traced(TraceStage(StageKind.STORE, 1000.0 + number, 1001.0 + number, num_blocks=1))
    engine.add(many)
    engine.run()
    traces.close()
    assert len(collector.named("kvferry.store")) == MAX_STAGES
    (request,) = collector.named("kvferry.request")
    # A match and a store are its own.
    assert request.attributes["kvferry.omitted_spans"] == 6 + 2
    assert traces.counts() == TraceCounts(MAX_STAGES + 1, 0)


def test_headers_of_clients_when_invalid_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    traces = Traces("engine", "model")
    try:
        assert traces.begin(
            {"baggage": "a=b;;;,%", "tracestate": "=", "traceparent": f"00-{'1' * 32}-{PARENT}-01"}, 1.0
        )
    finally:
        traces.close()
    assert [record.getMessage() for record in caplog.records] == []
