"""OpenTelemetry traces of requests, sent by OTLP over HTTP. Needs the packages of the extra `otel`.

Whether a request is sampled is decided once, when it arrives. The stages of a sampled one are queued as they end; a
thread makes spans of them and sends them, so that a slow collector costs spans only, which are counted. Exporter,
sampler and resource read the standard OTEL_* environment variables.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, get_global_textmap
from opentelemetry.sdk import environment_variables as otel
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState, get_current_span

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.threads import WatchedThread
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
_REQUEST = "kvferry.request"
_TRACE_PARENT, _UNSAMPLED = "traceparent", "-00"
_SCOPE = InstrumentationScope("kvferry")
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
class SampledCall:
    """A sampled call of a client: its context, if it sent one, and when it arrived."""

    traces: Traces
    parent: SpanContext | None
    trace_id: int
    trace_state: TraceState | None
    arrived_s: float

    def request(self) -> TracedRequest:
        """Return the receiver of the stages of one request of the call."""
        return TracedRequest(self, self.traces.new_context(self.trace_id, self.trace_state))


class TracedRequest:
    """Receiver of the stages of one sampled request. Requires: manager lock held."""

    def __init__(self, call: SampledCall, context: SpanContext) -> None:
        self.call = call
        self.context = context
        self.num_stages = 0

    def __call__(self, item: TraceStage | RequestView) -> None:
        """Queue a stage that has ended, or the finished request."""
        if isinstance(item, TraceStage):
            self.num_stages += 1
            if self.num_stages > MAX_STAGES:
                return
        self.call.traces.push(self, item)


class Traces:
    """Sampling, and a thread that sends the spans of sampled requests, from `start` to `close`."""

    def __init__(self, engine_name: str, model: str) -> None:
        """Read the OTEL_* variables. Raises `StartError` for those that cannot work."""
        self._num_exported = 0
        self._num_overflowed = 0
        self._num_failed = 0
        self._fault: str | None = None
        self._model = model
        delay_ms, self._max_batch, self._max_queued = read_variables()
        self._delay_s = delay_ms / 1000
        self._queue: deque[tuple[TracedRequest, TraceStage | RequestView]] = deque()
        self._wake = threading.Event()
        self.thread = WatchedThread("kvferry-traces", self._run, "spans are not sent")
        self._muted = _MutedLog()
        self._log = RateLimitedLogger(_log)
        provider = TracerProvider(resource=_resource(engine_name), shutdown_on_exit=False)
        self._sampler, self._ids, self._resource = provider.sampler, provider.id_generator, provider.resource
        self._clients_decide = isinstance(self._sampler, ParentBased) and _TRACE_PARENT in get_global_textmap().fields
        self._muted.mute_thread()
        try:
            self._exporter: SpanExporter = OTLPSpanExporter()
        except Exception as error:
            raise StartError(f"KVFERRY_TRACES=otlp: the exporter cannot be made: {type(error).__name__}") from error
        finally:
            self._muted.unmute_thread()
        if self._muted.num_lines:
            _log.warning(
                "traces: an OTEL_EXPORTER_OTLP_* variable is invalid and ignored; headers are written NAME=VALUE,..."
            )

    def counts(self) -> TraceCounts:
        """Return the spans so far. Dropped ones found the queue full, or were not taken by the collector."""
        return TraceCounts(self._num_exported, self._num_overflowed + self._num_failed)

    def degraded(self) -> list[str]:
        """Return why spans are not sent; empty if the latest were."""
        fault = self._fault
        return [] if fault is None else [f"traces: {fault}; check the collector and OTEL_EXPORTER_OTLP_ENDPOINT"]

    def begin(self, headers: Mapping[str, str] | None, arrived_s: float) -> SampledCall | None:
        """Return the call if it is sampled, by the client's `traceparent` and OTEL_TRACES_SAMPLER. Thread: any."""
        if self._clients_decide and headers and headers.get(_TRACE_PARENT, "").endswith(_UNSAMPLED):
            # Parsing takes 10 microseconds, in vLLM on the engine thread.
            return None
        try:
            # Propagators may take quadratic time.
            short = {name: value for name, value in (headers or {}).items() if len(value) <= MAX_HEADER_CHARS}
            context = extract(short)
            parent = get_current_span(context).get_span_context()
            trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
            found = self._sampler.should_sample(context, trace_id, _REQUEST, SpanKind.SERVER)
        except Exception as error:  # noqa: BLE001 - propagators and samplers may come from other packages
            _log.debug("traces: a request cannot be sampled: %s", type(error).__name__)
            return None
        if found.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        return SampledCall(self, parent if parent.is_valid else None, trace_id, found.trace_state, arrived_s)

    def new_context(self, trace_id: int, trace_state: TraceState | None) -> SpanContext:
        """Return the context of a new span."""
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id, self._ids.generate_span_id(), False, flags, trace_state)

    def push(self, trace: TracedRequest, item: TraceStage | RequestView) -> None:
        """Queue a span, or count it as dropped. Requires: manager lock held."""
        if len(self._queue) >= self._max_queued:
            self._num_overflowed += 1
            return
        self._queue.append((trace, item))
        if len(self._queue) >= self._max_batch:
            self._wake.set()

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """Send what is queued, for a bounded time. May be called before `start`."""
        self.thread.closing.set()
        self._wake.set()
        has_ended = self.thread.close(CLOSE_S)
        self._exporter.shutdown()
        if has_ended:
            self._muted.remove()
        if self._queue or not has_ended:
            _log.warning("traces: the last spans were not sent within %.0f s", CLOSE_S)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._muted.mute_thread()
        try:
            while not self.thread.closing.is_set() or self._queue:
                self._wake.wait(self._delay_s)
                self._wake.clear()
                while self._queue:
                    self._export([self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))])
        finally:
            self._muted.unmute_thread()

    def _export(self, batch: Sequence[tuple[TracedRequest, TraceStage | RequestView]]) -> None:
        self._muted.reason = ""
        try:
            result = self._exporter.export([self._span(trace, item) for trace, item in batch])
        except Exception as error:  # noqa: BLE001 - the thread must not die
            self._muted.reason, result = type(error).__name__, SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._num_exported += len(batch)
            if self._fault is not None:
                self._log.log(logging.INFO, "again", "traces: spans are sent again")
            self._fault = None
            return
        fault = f"spans cannot be sent: {self._muted.reason or 'unknown error'}"
        if self._fault is None:
            self._log.log(logging.WARNING, "fault", "traces: %s; requests are not affected", fault)
        # Before they are counted, so that a client which reads the count finds the reason.
        self._fault = fault
        self._num_failed += len(batch)

    def _span(self, trace: TracedRequest, item: TraceStage | RequestView) -> ReadableSpan:
        call = trace.call
        status, parent = Status(), call.parent
        if isinstance(item, TraceStage):
            name, kind, parent = f"kvferry.{item.kind}", SpanKind.INTERNAL, trace.context
            context = self.new_context(call.trace_id, call.trace_state)
            began_s, ended_s, attributes = item.began_s, item.ended_s, _stage_attributes(item)
            if item.error is not None:
                status = Status(StatusCode.ERROR, item.error[:200])
        else:
            name, kind, context = _REQUEST, SpanKind.SERVER, trace.context
            # The engine announces a request with the time at which its step began.
            began_s, ended_s = min(call.arrived_s, item.times.arrived_s), item.times.finished_s or item.times.arrived_s
            attributes = {"gen_ai.request.model": self._model, **_request_attributes(item)}
            if trace.num_stages > MAX_STAGES:
                attributes["kvferry.omitted_spans"] = trace.num_stages - MAX_STAGES
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=status,
            start_time=int(began_s * _NANOSECONDS),
            end_time=int(max(ended_s, began_s) * _NANOSECONDS),
            instrumentation_scope=_SCOPE,
        )


class _MutedLog(logging.Filter):
    """Keeps the exporter's log lines out of the log on some threads, and keeps the latest reason of a failure.

    The exporter logs each attempt, and its texts may contain headers and URLs with secrets. What is logged about the
    headers of clients is kept out on all threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self.num_lines = 0
        self._threads: set[int] = set()
        for name in (*_EXPORTER_LOGGERS, *_CLIENT_LOGGERS):
            logging.getLogger(name).addFilter(self)

    def mute_thread(self) -> None:
        """Keep what the calling thread causes out of the log."""
        self._threads.add(threading.get_ident())

    def unmute_thread(self) -> None:
        """Undo `mute_thread`."""
        self._threads.discard(threading.get_ident())

    def remove(self) -> None:
        """Remove the filter."""
        for name in (*_EXPORTER_LOGGERS, *_CLIENT_LOGGERS):
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if record.name in _CLIENT_LOGGERS:
            return False
        if record.thread not in self._threads:
            return True
        self.num_lines += 1
        args = record.args if isinstance(record.args, tuple) else ()
        error = next((arg for arg in args if isinstance(arg, Exception)), None)
        if error is not None:
            self.reason = type(error).__name__
        elif len(args) > 1:
            self.reason = record.getMessage()[:200]
        return False


def _request_attributes(view: RequestView) -> dict[str, str | int | float]:
    times, tokens, missed = view.times, view.prompt_tokens, view.missed_tokens
    num_tier_tokens = sum(tokens.tier_hit.values())
    found: dict[str, str | int | float] = {
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
        found |= {f"kvferry.missed_tokens.{prefix}{cause}": count for cause, count in counts.items() if count}
    if times.tier_s is not None:
        found["kvferry.tier_wait_s"] = times.tier_s
    if times.scheduled_s is not None:
        found["kvferry.wait_s"] = times.scheduled_s - times.arrived_s
    if times.computed_s is not None:
        found["kvferry.first_token_s"] = times.computed_s - times.arrived_s
    return found


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
