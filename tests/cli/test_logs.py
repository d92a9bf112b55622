"""Logging: never waits, never shows a secret, one format for all loggers."""

from __future__ import annotations

import base64
import io
import json
import linecache
import logging
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn
from fastapi import FastAPI

from kvferry.app.settings import Settings
from kvferry.app.settings.fields import LogLevel
from kvferry.app.telemetry.logs import QUEUE_RECORDS, LogPipe, RateLimitedLogger, start_logging
from tests.harness.waiting import DEADLINE_S, wait_until


@pytest.fixture(autouse=True)
def clean_root() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    assert (root.handlers[:], root.level) == before, "closing puts logging back as it was"


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def logged(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines(stream: io.StringIO) -> None:
    with start_logging(Settings(log_format="json"), stream=stream):
        logging.getLogger("kvferry.app.x").warning("%d blocks of %s", 3, "ümlaut", extra={"epoch": 7})
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("elsewhere").exception("it\nfailed")
    first, second = logged(stream)
    assert (
        first.items()
        >= {"level": "warning", "logger": "kvferry.app.x", "message": "3 blocks of ümlaut", "epoch": 7}.items()
    )
    assert first["time"].endswith("Z")
    assert second["message"] == "it\nfailed"
    assert "ValueError: why" in second["exception"]


def test_text_lines_with_traceback(stream: io.StringIO) -> None:
    with start_logging(Settings(), stream=stream):
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("kvferry.core.pool.manager").exception("dropped")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ERROR    kvferry.core.pool.manager: dropped")
    assert lines[-1] == "ValueError: why"


def test_source_of_a_traceback_is_read_by_the_writing_thread(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []
    plain = linecache.updatecache

    def note(*args: Any) -> list[str]:
        readers.append(threading.current_thread())
        return plain(*args)

    linecache.clearcache()
    monkeypatch.setattr(linecache, "updatecache", note)
    with start_logging(Settings(), stream=stream):
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("kvferry").exception("it failed")
    assert 'raise ValueError("why")' in stream.getvalue()
    assert threading.main_thread() not in readers != []


def test_level_may_change_while_running(stream: io.StringIO) -> None:
    with start_logging(Settings(log_level="warning"), stream=stream) as pipe:
        log = logging.getLogger("kvferry.cuda_ops.pool")
        log.info("one")
        pipe.set_level(LogLevel.DEBUG)
        log.debug("two")
        pipe.set_level(LogLevel.ERROR)
        log.warning("three")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["two"]


@pytest.mark.parametrize("own_loggers_only", [False, True])
def test_events_of_streams_are_not_logged_at_any_level(own_loggers_only: bool, stream: io.StringIO) -> None:
    """It is users' text, and the library would log each event that it sends."""
    with start_logging(Settings(log_level="debug"), stream=stream, own_loggers_only=own_loggers_only) as pipe:
        pipe.set_level(LogLevel.DEBUG)
        logging.getLogger("sse_starlette.sse").debug("chunk: %s", "private text")
        logging.getLogger("kvferry.cuda_ops.pool").debug("ours")
    assert "ours" in stream.getvalue()
    assert "private text" not in stream.getvalue()


def test_secrets_in_log_messages_and_tracebacks_are_masked(stream: io.StringIO) -> None:
    settings = Settings(
        admin_token="adm1n-t0ken", read_token="adm1n-t0ken-read", database_url="postgresql://kv:p%40ss-word@h/d"
    )
    with start_logging(settings, stream=stream):
        logging.getLogger("kvferry.app").warning("header %s %s", "Bearer adm1n-t0ken", {"r": "adm1n-t0ken-read"})
        try:
            raise ValueError("postgresql://kv:p%40ss-word@h/d or p@ss-word")
        except ValueError:
            logging.getLogger("kvferry.app").exception("database")
    text = stream.getvalue()
    for secret in ("adm1n", "t0ken", "ss-word"):
        assert secret not in text
    assert "Bearer ***" in text
    assert "-read" not in text


@pytest.mark.parametrize("before", ["", "u", "u:"])
def test_secrets_when_encoded_are_masked_too(before: str, stream: io.StringIO) -> None:
    secret = 'to"ken/with=odd+chars'
    encoded = base64.b64encode(f"{before}{secret}!".encode()).decode()
    with start_logging(Settings(admin_token=secret, engine_api_key="key-of-engine"), stream=stream):
        logging.getLogger("kvferry.app").warning("%s %s", encoded, encoded.replace("+", "-").replace("/", "_"))
        logging.getLogger("kvferry.app").warning("%s %s", quote(secret, safe=""), quote(secret, safe="").lower())
        logging.getLogger("kvferry.app").warning("%s key-of-engine", json.dumps(secret))
    text = stream.getvalue()
    for part in ("key-of", "ken/with", "ken%2Fwith", "ken%2fwith", base64.b64encode(secret.encode()).decode()[8:20]):
        assert part not in text
    assert encoded[8:20] not in text


class StuckStream(io.StringIO):
    """A pipe that nobody reads, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = threading.Event()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.stuck.set()
        self.let_go.wait(DEADLINE_S)
        return super().write(text)


def test_log_when_its_stream_blocks_drops_and_counts_records() -> None:
    stream = StuckStream()
    pipe = start_logging(Settings(log_format="json"), stream=stream)
    log = logging.getLogger("kvferry.app")
    try:
        log.warning("first")
        assert stream.stuck.wait(DEADLINE_S)
        for number in range(QUEUE_RECORDS + 25):
            log.warning("record %d", number)
        assert pipe.dropped == 25
        stream.let_go.set()
        wait_until(lambda: f"record {QUEUE_RECORDS - 1}" in stream.getvalue(), "the queue is written")
    finally:
        stream.let_go.set()
        pipe.close()
        pipe.close()
    messages = [item["message"] for item in logged(stream)]
    assert messages.count("dropped 25 log records that arrived faster than they could be written") == 1
    assert len(messages) == QUEUE_RECORDS + 2


def test_arguments_are_read_when_logged_not_when_written(stream: io.StringIO) -> None:
    blocks = [1, 2]
    with start_logging(Settings(), stream=stream):
        logging.getLogger("kvferry.app").warning("blocks %s", blocks)
        blocks.append(3)
    assert "blocks [1, 2]\n" in stream.getvalue()


def test_uvicorn_logs_in_the_same_format(stream: io.StringIO) -> None:
    with start_logging(Settings(log_format="json"), stream=stream):
        uvicorn.Config(FastAPI(), log_config=None, log_level=None).load()
        logging.getLogger("uvicorn.error").info("Started")
        logging.getLogger("uvicorn.access").info(
            '%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", "/healthz", "1.1", 200
        )
    messages = [(item["logger"], item["message"]) for item in logged(stream)]
    assert messages == [
        ("uvicorn.error", "Started"),
        ("uvicorn.access", '127.0.0.1:1 - "GET /healthz HTTP/1.1" 200'),
    ]


def test_log_pipe_with_own_loggers_only_leaves_others_alone(stream: io.StringIO) -> None:
    host = io.StringIO()
    handler = logging.StreamHandler(host)
    logging.getLogger().addHandler(handler)
    try:
        with LogPipe(Settings(), stream=stream, own_loggers_only=True):
            logging.getLogger("vllm.engine").warning("host's")
            logging.getLogger("kvferry.app.engines").warning("ours")
            logging.getLogger("uvicorn.error").warning("the server's")
    finally:
        logging.getLogger().removeHandler(handler)
    assert host.getvalue() == "host's\n"
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["ours", "the server's"]


def test_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    seldom = RateLimitedLogger(
        logging.getLogger("kvferry.app.telemetry.logs"), interval_s=60, max_keys=2, clock=lambda: now_s[0]
    )

    def log(key: str) -> bool:
        return seldom.log(logging.WARNING, key, "bad %s", key)

    assert [log("a"), log("a"), log("a"), log("b")] == [True, False, False, True]
    now_s[0] = 60.0
    assert log("a")
    assert [record.getMessage() for record in caplog.records] == [
        "bad a",
        "bad b",
        "bad a (2 more since the last time)",
    ]
    assert log("c"), "a third key pushes the oldest out"
    assert log("b")
    assert not log("c")
