"""A generated trace of short sessions of agents: few system prompts, which begin all prompts, and many short calls."""

from __future__ import annotations

import random
from itertools import count, islice

from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

KINDS = 12
"""Kinds of agents, each with a system prompt that describes its tools; the first ones run more often."""
SYSTEM_IDS = (6, 24)
SESSIONS = 150
CALLS = (3, 30)
TASK_IDS, RESULT_IDS = (1, 4), (1, 3)
"""Bounds of the hash ids that a task and that the result of a tool have."""
OUTPUT_TOKENS = (20, 700)
ARRIVALS_MS = 300_000
TOOL_MS, PERSON_MS = (500, 15_000), (60_000, 900_000)
PERSON_SHARE = 0.15
"""Share of the calls before which a person is asked."""


def session_trace(seed: int) -> list[TraceRequest]:
    """Return the calls of agents; each continues the prompt of the one before."""
    rng, new_ids = random.Random(seed), count()
    systems = [list(islice(new_ids, rng.randint(*SYSTEM_IDS))) for _ in range(KINDS)]
    requests = []
    for _ in range(SESSIONS):
        (system,) = rng.choices(systems, [1 / (number + 1) for number in range(KINDS)])
        hash_ids = [*system, *islice(new_ids, rng.randint(*TASK_IDS))]
        time_ms = rng.uniform(0, ARRIVALS_MS)
        for _ in range(rng.randint(*CALLS)):
            length = len(hash_ids) * TRACE_BLOCK_TOKENS
            requests.append(TraceRequest(time_ms, length, rng.randint(*OUTPUT_TOKENS), tuple(hash_ids)))
            hash_ids += islice(new_ids, rng.randint(*RESULT_IDS))
            time_ms += rng.uniform(*(PERSON_MS if rng.random() < PERSON_SHARE else TOOL_MS))
    return sorted(requests, key=lambda request: request.timestamp)
