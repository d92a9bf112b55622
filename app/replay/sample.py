"""A generated trace of conversations, for a first replay without a recorded one."""

from __future__ import annotations

import random
from itertools import count, islice

from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

CONVERSATIONS = 60
TURNS = 5
SYSTEM_PROMPTS = 4
"""Number of beginnings that conversations share."""
SYSTEM_PROMPT_IDS = 4
TURN_IDS = (4, 12)
"""Bounds of the hash ids that a turn adds: together several times what the embedded engine's device holds."""
OUTPUT_TOKENS = (50, 500)
ARRIVALS_MS = 300_000
THINK_MS = (5_000, 60_000)


def sample_trace(seed: int) -> list[TraceRequest]:
    """Return the requests of conversations that share beginnings, and go on after others have run."""
    rng = random.Random(seed)
    new_ids = count(SYSTEM_PROMPTS * SYSTEM_PROMPT_IDS)
    requests = []
    for _ in range(CONVERSATIONS):
        first_id = rng.randrange(SYSTEM_PROMPTS) * SYSTEM_PROMPT_IDS
        hash_ids = [*range(first_id, first_id + SYSTEM_PROMPT_IDS)]
        time_ms = rng.uniform(0, ARRIVALS_MS)
        for _ in range(TURNS):
            hash_ids += islice(new_ids, rng.randint(*TURN_IDS))
            input_length = len(hash_ids) * TRACE_BLOCK_TOKENS
            requests.append(TraceRequest(time_ms, input_length, rng.randint(*OUTPUT_TOKENS), tuple(hash_ids)))
            time_ms += rng.uniform(*THINK_MS)
    return sorted(requests, key=lambda request: request.timestamp)
