"""A peer for replays: speaks the few calls of the contract that a replay needs, and fails when told to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

OUTPUT_TOKEN = 65


class EnginePeer:
    """Counts prompt tokens as a cache of whole prompts would: seen ones are host hits, others are recomputed."""

    def __init__(self, context_tokens: int | None = 256) -> None:
        self.context_tokens = context_tokens
        self.bodies: list[dict[str, Any]] = []
        self.request_ids: list[str] = []
        self.authorizations: dict[str, set[str | None]] = {}
        self.fail_every: int | None = None
        self.break_every: int | None = None
        self.stats_calls = 0
        self.running = 0
        self.most_running = 0
        self.gather: int | None = None
        self._seen: set[tuple[int, ...]] = set()
        self._tokens = {"total": 0, "device_hit": 0, "host_hit": 0, "tier_hit": {"fs": 0}, "recomputed": 0}
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._together = asyncio.Event()
        self.app = FastAPI(dependencies=[Depends(self._note_authorization)])
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._complete)
        self.app.get("/admin/v1/stats")(self._stats)

    async def _note_authorization(self, request: Request) -> None:
        self.authorizations.setdefault(request.url.path, set()).add(request.headers.get("Authorization"))

    async def _models(self) -> dict[str, Any]:
        card: dict[str, Any] = {"id": "peer", "object": "model"}
        return {
            "object": "list",
            "data": [card | ({"max_model_len": self.context_tokens} if self.context_tokens else {})],
        }

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers["X-Request-ID"])
        number = len(self.bodies)
        if self.fail_every and number % self.fail_every == 0:
            return JSONResponse({"error": {"message": "no room today", "type": "server_error"}}, 503)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.gather is not None:
            if self.running >= self.gather:
                self._together.set()
            await self._together.wait()
        prompt = tuple(body["prompt"])
        kind = "host_hit" if prompt in self._seen else "recomputed"
        self._seen.add(prompt)
        self._tokens[kind] += len(prompt)  # type: ignore[operator]
        self._tokens["total"] += len(prompt)  # type: ignore[operator]
        breaks = bool(self.break_every) and number % (self.break_every or 1) == 0
        return StreamingResponse(self._chunks(body, breaks), media_type="text/event-stream")

    async def _chunks(self, body: dict[str, Any], breaks: bool) -> AsyncIterator[str]:
        yield ": hello\r\n\r\n"
        for _ in range(body["max_tokens"]):
            choice = {"index": 0, "text": "A", "token_ids": [OUTPUT_TOKEN], "finish_reason": None}
            yield f"data: {json.dumps({'choices': [choice]})}\r\n\r\n"
        self.running -= 1
        if breaks:
            yield f"data: {json.dumps({'error': {'message': 'lost it', 'type': 'server_error'}})}\r\n\r\n"
        yield "data: [DONE]\r\n\r\n"

    async def _stats(self) -> dict[str, Any]:
        self.stats_calls += 1
        return {
            "uptime_s": time.monotonic() - self._started_s,
            "prompt_tokens": {**self._tokens, "tier_hit": dict(self._tokens["tier_hit"])},  # type: ignore[call-overload]
            "requests": {"running": self.running},
            "store": {"stored": self._tokens["recomputed"], "bytes": 0, "in_flight": 0},
            "load": {"blocks": self._tokens["host_hit"], "bytes": 1 << 20},
            "evictions": {"total": 0},
        }
