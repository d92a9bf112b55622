"""Forward pass over the chunks of a step, and sampling of the resulting tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from kvferry.app.engines.embedded.attention import PagedBatch, PagedKVCache, Span
from kvferry.app.engines.embedded.model import LoadedModel
from kvferry.app.engines.embedded.request import Request
from kvferry.app.engines.embedded.scheduler import Chunk

MIN_TEMPERATURE = 1e-5
"""Below it the most likely token is returned, as by vLLM: scores that are divided by less overflow."""


def sample(logits: Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int]) -> list[int]:
    """Return one token for each row of `[requests, vocabulary]` logits."""
    for row, request in enumerate(requests):
        if eos_token_ids and not request.may_end:
            logits[row, eos_token_ids] = -torch.inf
    chosen = logits.argmax(dim=-1)
    for row, request in enumerate(requests):
        if request.sampling.temperature >= MIN_TEMPERATURE:
            chosen[row] = _draw(logits[row], request)
    return [int(token) for token in chosen.tolist()]


def _draw(logits: Tensor, request: Request) -> Tensor:
    """Draw a token in proportion to its probability."""
    if request.generator is None:
        request.generator = torch.Generator(device=logits.device)
        if request.sampling.seed is None:
            request.generator.seed()
        else:
            request.generator.manual_seed(request.sampling.seed)
    scores = logits[None].to(torch.promote_types(logits.dtype, torch.float32))
    # Finite at any temperature: the best has 0.
    scores = (scores - scores.max()) / request.sampling.temperature
    if request.sampling.top_p < 1:
        scores = TopPLogitsWarper(request.sampling.top_p)(torch.empty(0), scores)
    # The largest ratio to exponential noise: faster than `torch.multinomial`, which sums up all of them.
    probabilities = torch.softmax(scores[0], dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=request.generator)).argmax()


class ModelRunner:
    """Concatenates the chunks of a step in one row and runs the model over it."""

    def __init__(self, model: LoadedModel, cache: PagedKVCache) -> None:
        self._model = model
        self._cache = cache
        self.eos_token_ids = [token for token in model.eos_token_ids if token < model.vocab_size]

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Return the next token of each chunk that reaches its request's end, None for the others.

        The device has completed the pass: blocks that the step read may be overwritten.
        """
        if not chunks:
            return []
        try:
            sampling = [chunk.request for chunk in chunks if chunk.samples]
            tokens = iter(sample(self._forward(chunks), sampling, self.eos_token_ids))
            return [next(tokens) if chunk.samples else None for chunk in chunks]
        finally:
            if self._model.device.type == "cuda":
                torch.cuda.current_stream(self._model.device).synchronize()

    def _forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return logits `[samples, vocabulary]` of the last token of each chunk that samples."""
        ids: list[int] = []
        positions, blocks, last_rows = [], [], []
        spans = []
        block_size = self._cache.block_size
        for chunk in chunks:
            start, end = chunk.request.num_computed_tokens, chunk.request.num_computed_tokens + chunk.num_new_tokens
            table = np.asarray(chunk.request.block_table[: -(-end // block_size)], dtype=np.int64)
            at = np.arange(start, end)
            spans.append(Span(len(ids), chunk.num_new_tokens, end, self._to_device(table)))
            ids.extend(chunk.request.token_ids[start:end])
            positions.append(at)
            blocks.append(table[at // block_size])
            if chunk.samples:
                last_rows.append(len(ids) - 1)
        at = np.concatenate(positions)
        batch = PagedBatch(
            self._cache, spans, self._to_device(np.concatenate(blocks)), self._to_device(at % block_size)
        )
        output = self._model.module(
            input_ids=self._to_device(np.asarray(ids))[None],
            position_ids=self._to_device(at)[None],
            use_cache=False,
            logits_to_keep=self._to_device(np.asarray(last_rows, dtype=np.int64)),
            paged=batch.attend,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _to_device(self, array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)
