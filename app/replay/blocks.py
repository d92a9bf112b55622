"""The requests of a trace as shadow caches take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest
from kvferry.core.keys import make_keys
from kvferry.core.pool.events import RequestBlocks


def request_blocks(trace: Sequence[TraceRequest]) -> Iterator[RequestBlocks]:
    """Yield the requests with a key for each full block; blocks of answers are the same as no others."""
    # Of one length with the others, and above all ids.
    answers = count(1 << 63)
    for request in trace:
        num_prompt = request.input_length // TRACE_BLOCK_TOKENS
        # The last token of an answer is not computed.
        num_blocks = (request.input_length + max(request.output_length - 1, 0)) // TRACE_BLOCK_TOKENS
        hashes = [hash_id.to_bytes(8, "little") for hash_id in request.hash_ids[:num_prompt]]
        hashes += [next(answers).to_bytes(8, "little") for _ in range(num_blocks - num_prompt)]
        yield RequestBlocks(
            request.timestamp / 1000, make_keys(hashes, 0), request.input_length, request.output_length, num_prompt, 0
        )
