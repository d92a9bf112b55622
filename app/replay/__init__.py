"""Replay of a recorded trace against a running engine, to measure what serves the prompt tokens."""

from kvferry.app.replay.mapping import MappedRequest, Mapping, map_request
from kvferry.app.replay.report import Report, make_report
from kvferry.app.replay.runner import Options, Outcome, run_replay
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, BadTrace, TraceRequest, read_trace

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "BadTrace",
    "MappedRequest",
    "Mapping",
    "Options",
    "Outcome",
    "Report",
    "TraceRequest",
    "make_report",
    "map_request",
    "read_trace",
    "run_replay",
]
