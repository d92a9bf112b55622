"""A generated trace of agents, whose tasks share long prefixes."""

from __future__ import annotations

import random
from itertools import count, islice

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
REQUESTS = 3_000


def agent_trace(seed: int, num_requests: int = REQUESTS, first_id: int = 0) -> list[TraceRequest]:
    """Return the first requests of agents, with hash ids from `first_id` on."""
    rng, new_ids = random.Random(seed), count(first_id)
    kinds = [list(islice(new_ids, rng.randint(*KIND_IDS))) for _ in range(KINDS)]
    projects = [[*rng.choice(kinds), *islice(new_ids, rng.randint(*PROJECT_IDS))] for _ in range(PROJECTS)]
    requests: list[TraceRequest] = []
    starts_ms, names = 0.0, count()
    # Requests up to the start of the latest task are complete, as all later ones come behind it.
    while sum(one.timestamp <= starts_ms for one in requests) < num_requests:
        starts_ms += rng.expovariate(1 / TASK_INTERVAL_MS)
        hash_ids, time_ms = list(projects[min(int(rng.expovariate(6 / PROJECTS)), PROJECTS - 1)]), starts_ms
        name = f"task-{next(names)}"
        for _ in range(rng.randint(*STEPS)):
            hash_ids += islice(new_ids, rng.randint(*STEP_IDS))
            requests.append(_request(time_ms, hash_ids, rng.randint(*STEP_OUTPUT_TOKENS), name))
            if rng.random() < ONCE_SHARE:
                once = list(islice(new_ids, rng.randint(*ONCE_IDS)))
                requests.append(_request(time_ms, once, rng.randint(*ONCE_OUTPUT_TOKENS), None))
            time_ms += rng.uniform(*TOOL_MS)
    return sorted(requests, key=lambda one: one.timestamp)[:num_requests]


def _request(time_ms: float, hash_ids: list[int], output_length: int, session: str | None) -> TraceRequest:
    num_tokens = len(hash_ids) * TRACE_BLOCK_TOKENS
    return TraceRequest(time_ms, num_tokens, output_length, tuple(hash_ids), session_id=session)
