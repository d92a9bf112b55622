"""OpenTelemetry traces of requests, sent by OTLP over HTTP. Needs the packages of the extra `otel`.

The SDK samples, batches and sends, as the standard OTEL_* environment variables say; a slow collector costs spans only,
which are counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk import environment_variables as otel
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.core.counters import counter
from kvferry.core.errors import StartError
from kvferry.core.scheduler.requests import RequestView, TraceStage

_log = logging.getLogger(__name__)

MAX_STAGES = 64
"""Stages of one request that become spans; a long answer is stored in many jobs."""
MAX_HEADER_CHARS = 512
"""Longest header of a client that is read, as W3C Trace Context asks for."""
CLOSE_S = 2.0
"""Spans that are not sent by then are lost."""
_NANOSECONDS = 1_000_000_000
_EXPORTER_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.util.re")
"""Those that may log secrets."""
_CLIENT_LOGGERS = (
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)
"""Those that log invalid headers of clients, with their text; a client could repeat these without end."""


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """Spans of traced requests."""

    exported: int = counter(
        "Spans that the collector took",
        "trace_spans",
        label=("result", "exported"),
        help="Spans of sampled requests: sent, or dropped since the collector is down or slow",
    )
    dropped: int = counter("Spans that were not sent", "trace_spans", label=("result", "dropped"))


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of a client that may be sampled: its context, and when it arrived."""

    traces: Traces
    context: Context
    arrived_s: float

    def request(self) -> TracedRequest | None:
        """Return the receiver of the stages of one request of the call, None if the sampler leaves it out."""
        start_time = int(self.arrived_s * _NANOSECONDS)
        try:
            span = self.traces.tracer.start_span(
                "kvferry.request", self.context, SpanKind.SERVER, start_time=start_time
            )
        except Exception as error:  # noqa: BLE001 - samplers may come from other packages
            _log.debug("traces: a request cannot be sampled: %s", type(error).__name__)
            return None
        return TracedRequest(self, span) if span.is_recording() else None


class TracedRequest:
    """Receiver of the stages of one sampled request. Requires: manager lock held."""

    def __init__(self, call: TracedCall, span: Span) -> None:
        self._call = call
        self._span = span
        self._num_stages = 0

    def __call__(self, item: TraceStage | RequestView) -> None:
        """Make a span of a stage that has ended, or end the span of the finished request."""
        if isinstance(item, RequestView):
            self._finish(item)
            return
        self._num_stages += 1
        if self._num_stages > MAX_STAGES:
            return
        # The engine announces a request with the time at which its step began.
        began_s = max(item.began_s, self._call.arrived_s)
        span = self._call.traces.tracer.start_span(
            f"kvferry.{item.kind}",
            set_span_in_context(self._span),
            attributes=_stage_attributes(item),
            start_time=int(began_s * _NANOSECONDS),
        )
        if item.error is not None:
            span.set_status(Status(StatusCode.ERROR, item.error[:200]))
        span.end(int(max(item.ended_s, began_s) * _NANOSECONDS))

    def _finish(self, view: RequestView) -> None:
        self._span.set_attribute("gen_ai.request.model", self._call.traces.model)
        self._span.set_attributes(_request_attributes(view))
        if self._num_stages > MAX_STAGES:
            self._span.set_attribute("kvferry.omitted_spans", self._num_stages - MAX_STAGES)
        ended_s = view.times.finished_s or view.times.arrived_s
        self._span.end(int(max(ended_s, self._call.arrived_s) * _NANOSECONDS))


class Traces(SpanProcessor):
    """Sampling and sending of spans, until `close`. Counts those that wait, since the SDK drops without a count."""

    def __init__(self, engine_name: str, model: str) -> None:
        """Read the OTEL_* variables. Raises `StartError` for those that cannot work."""
        self.model = model
        self._num_accepted = 0
        self._num_overflowed = 0
        delay_ms, max_batch, self._max_queued = read_variables()
        self._exporter = _CountingExporter()
        self._batches = BatchSpanProcessor(self._exporter, self._max_queued, delay_ms, min(max_batch, self._max_queued))
        self._provider = TracerProvider(resource=_resource(engine_name), shutdown_on_exit=False)
        self._provider.add_span_processor(self)
        self.tracer = self._provider.get_tracer("kvferry")

    def counts(self) -> TraceCounts:
        """Return the spans so far. Dropped ones found the queue full, or were not taken by the collector."""
        return TraceCounts(self._exporter.num_exported, self._num_overflowed + self._exporter.num_failed)

    def degraded(self) -> list[str]:
        """Return why spans are not sent; empty if the latest were."""
        fault = self._exporter.fault
        return [] if fault is None else [f"traces: {fault}; check the collector and the OTEL_EXPORTER_OTLP_* variables"]

    def begin(self, headers: Mapping[str, str] | None, arrived_s: float) -> TracedCall | None:
        """Return the call, with the context of the client's headers. Thread: any."""
        # Propagators may take quadratic time.
        short = {name: value for name, value in (headers or {}).items() if len(value) <= MAX_HEADER_CHARS}
        try:
            return TracedCall(self, extract(short), arrived_s)
        except Exception as error:  # noqa: BLE001 - propagators may come from other packages
            _log.debug("traces: the headers of a request cannot be read: %s", type(error).__name__)
            return None

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or count it as dropped. Requires: manager lock held."""
        if self._num_accepted - self._exporter.num_taken >= self._max_queued:
            self._num_overflowed += 1
            return
        self._num_accepted += 1
        self._batches.on_end(span)

    def close(self) -> None:
        """Send what is queued, for a bounded time."""
        thread = threading.Thread(target=self._batches.shutdown, name="kvferry-traces-close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        self._exporter.shutdown()
        if thread.is_alive() or self._num_accepted > self._exporter.num_taken:
            _log.warning("traces: the last spans were not sent within %.0f s", CLOSE_S)


class _CountingExporter(SpanExporter):
    """Sends spans by OTLP, counts them, and logs the reasons of failures instead of the exporter, without secrets."""

    def __init__(self) -> None:
        self.num_taken = 0
        """Spans that left the queue."""
        self.num_exported = 0
        self.num_failed = 0
        self.fault: str | None = None
        """Why the latest spans were not sent."""
        self._log = RateLimitedLogger(_log)
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(_quiet_log)
        for name in _CLIENT_LOGGERS:
            logging.getLogger(name).disabled = True
        try:
            self._exporter: SpanExporter = OTLPSpanExporter()
        except Exception as error:
            raise StartError(f"KVFERRY_TRACES=otlp: the exporter cannot be made: {type(error).__name__}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Thread: the SDK's."""
        self.num_taken += len(spans)
        _quiet_log.reason = ""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - the SDK would log it
            _quiet_log.reason, result = type(error).__name__, SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
            if self.fault is not None:
                self._log.log(logging.INFO, "again", "traces: spans are sent again")
            self.fault = None
            return result
        fault = f"spans cannot be sent: {_quiet_log.reason or 'unknown error'}"
        if self.fault is None:
            self._log.log(logging.WARNING, "fault", "traces: %s; requests are not affected", fault)
        # Before they are counted, so that a client which reads the count finds the reason.
        self.fault = fault
        self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        """End what is being sent. May be called again."""
        self._exporter.shutdown()


class _QuietLog(logging.Filter):
    """Drops the exporter's lines, since they may hold secrets, and remembers why the latest export failed."""

    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        args = record.args if isinstance(record.args, tuple) else ()
        error = next((arg for arg in args if isinstance(arg, Exception)), None)
        if error is not None:
            self.reason = type(error).__name__
        elif len(args) > 1:
            self.reason = record.getMessage()[:200]
        return False


_quiet_log = _QuietLog()


def _request_attributes(view: RequestView) -> dict[str, str | int | float]:
    times, tokens, missed = view.times, view.prompt_tokens, view.missed_tokens
    num_tier_tokens = sum(tokens.tier_hit.values())
    attributes: dict[str, str | int | float] = {
        "gen_ai.usage.input_tokens": view.num_prompt_tokens,
        "gen_ai.usage.output_tokens": view.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": tokens.device_hit + tokens.host_hit + num_tier_tokens,
        "kvferry.request_id": view.request_id,
        "kvferry.prompt_tokens.device_hit": tokens.device_hit,
        "kvferry.prompt_tokens.host_hit": tokens.host_hit,
        "kvferry.prompt_tokens.tier_hit": num_tier_tokens,
        "kvferry.prompt_tokens.recomputed": tokens.recomputed,
        "kvferry.load_s": times.load_s,
    }
    for prefix, counts in (("", missed.causes), ("evicted.", missed.evicted), ("not_stored.", missed.not_stored)):
        attributes |= {f"kvferry.missed_tokens.{prefix}{cause}": count for cause, count in counts.items() if count}
    if times.tier_s is not None:
        attributes["kvferry.tier_wait_s"] = times.tier_s
    if times.scheduled_s is not None:
        attributes["kvferry.wait_s"] = times.scheduled_s - times.arrived_s
    if times.computed_s is not None:
        attributes["kvferry.first_token_s"] = times.computed_s - times.arrived_s
    return attributes


def _stage_attributes(stage: TraceStage) -> dict[str, str | int | float]:
    counts = {
        "lookups": stage.num_lookups,
        "tokens": stage.num_tokens,
        "blocks": stage.num_blocks,
        "bytes": stage.num_bytes,
        "copy_s": stage.copy_s,
    }
    return {f"kvferry.{name}": count for name, count in counts.items() if count}


def _resource(engine_name: str) -> Resource:
    """Return what the spans are of; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go first."""
    ours = Resource({SERVICE_NAME: "kvferry", SERVICE_INSTANCE_ID: engine_name})
    return Resource.create(ours.merge(OTELResourceDetector().detect()).attributes)


def read_variables() -> tuple[int, int, int]:
    """Return milliseconds between exports, spans an export, and spans that may wait. Raises `StartError`."""
    for name in (otel.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, otel.OTEL_EXPORTER_OTLP_PROTOCOL):
        protocol = os.environ.get(name, "")
        if protocol == "http/protobuf":
            break
        if protocol:
            raise StartError(
                f"{name}={protocol}: spans are sent by http/protobuf only; set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="
                "http/protobuf, and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT to such an endpoint of the collector"
            )
    return (
        _number(otel.OTEL_BSP_SCHEDULE_DELAY, 1000),
        _number(otel.OTEL_BSP_MAX_EXPORT_BATCH_SIZE, 512),
        _number(otel.OTEL_BSP_MAX_QUEUE_SIZE, 8192),
    )


def _number(name: str, default: int) -> int:
    """Return a positive number from an environment variable of the SDK. Raises `StartError`."""
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal() or int(text) == 0:
        raise StartError(f"{name}={text}: not a positive whole number; correct it or leave it out")
    return int(text)
