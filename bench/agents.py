"""Traces of agents: a generated one, whose tasks share long prefixes, and recorded sessions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

KINDS, KIND_IDS = 12, (8, 30)
"""Kinds of agents, and bounds of the hash ids of their instructions and tools."""
PROJECTS, PROJECT_IDS = 40, (10, 40)
"""Projects, and bounds of the hash ids of their files, which follow the instructions; a few have most of the tasks."""
STEPS, STEP_IDS, STEP_OUTPUT_TOKENS = (5, 40), (1, 3), (40, 300)
TOOL_MS = (5_000, 150_000)
"""Time of a tool, after which the next step of its task comes."""
ONCE_SHARE, ONCE_IDS, ONCE_OUTPUT_TOKENS = 0.08, (20, 60), (300, 900)
"""Share of the requests with a prompt that comes once, such as a document."""
TASK_INTERVAL_MS = 7_000
SESSION_INTERVAL_MS = 60_000
"""Time between the beginnings of recorded sessions, which are those of different days."""
REQUESTS = 3_000


def agent_trace(seed: int, num_requests: int = REQUESTS, first_id: int = 0) -> list[TraceRequest]:
    """Return the first requests of agents, with hash ids from `first_id` on."""
    rng, new_ids = random.Random(seed), count(first_id)
    kinds = [list(islice(new_ids, rng.randint(*KIND_IDS))) for _ in range(KINDS)]
    projects = [[*rng.choice(kinds), *islice(new_ids, rng.randint(*PROJECT_IDS))] for _ in range(PROJECTS)]
    requests: list[TraceRequest] = []
    starts_ms = 0.0
    # Requests up to the start of the latest task are complete, as all later ones come behind it.
    while sum(one.timestamp <= starts_ms for one in requests) < num_requests:
        starts_ms += rng.expovariate(1 / TASK_INTERVAL_MS)
        hash_ids, time_ms = list(projects[min(int(rng.expovariate(6 / PROJECTS)), PROJECTS - 1)]), starts_ms
        for _ in range(rng.randint(*STEPS)):
            hash_ids += islice(new_ids, rng.randint(*STEP_IDS))
            requests.append(_request(time_ms, hash_ids, rng.randint(*STEP_OUTPUT_TOKENS)))
            if rng.random() < ONCE_SHARE:
                once = list(islice(new_ids, rng.randint(*ONCE_IDS)))
                requests.append(_request(time_ms, once, rng.randint(*ONCE_OUTPUT_TOKENS)))
            time_ms += rng.uniform(*TOOL_MS)
    return sorted(requests, key=lambda one: one.timestamp)[:num_requests]


def read_sessions(folder: Path) -> list[TraceRequest]:
    """Read the sessions of a folder, in the format of callanjfox/kv-cache-tester, one file each.

    Their blocks become those of a trace: a prompt has as many, and more tokens.
    """
    requests, first_id = [], 0
    for number, path in enumerate(sorted(folder.glob("*.json"))):
        session = json.loads(path.read_text(encoding="utf-8"))
        factor, largest = TRACE_BLOCK_TOKENS // session["block_size"], 0
        for one in _flat(session["requests"]):
            ids = tuple(first_id + hash_id for hash_id in one["hash_ids"])
            largest = max(largest, *one["hash_ids"])
            num_tokens = min(one["in"] * factor, len(ids) * TRACE_BLOCK_TOKENS)
            time_ms = number * SESSION_INTERVAL_MS + one["t"] * 1000
            requests.append(TraceRequest(time_ms, num_tokens, one["out"] * factor, ids))
        first_id += largest + 1
    return sorted(requests, key=lambda one: one.timestamp)


def _flat(requests: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the requests of a session with those of its sub-agents."""
    for one in requests:
        if "requests" in one:
            yield from _flat(one["requests"])
        elif one["hash_ids"]:
            yield one


def _request(time_ms: float, hash_ids: list[int], output_length: int) -> TraceRequest:
    return TraceRequest(time_ms, len(hash_ids) * TRACE_BLOCK_TOKENS, output_length, tuple(hash_ids))
