"""Sampling of the next tokens: greedy at temperature 0, else with the request's own random generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.app.engines.embedded.request import Request


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Return one token for each row of `[requests, vocabulary]` logits."""
    chosen = logits.argmax(dim=-1)
    for row, request in enumerate(requests):
        if request.sampling.temperature > 0:
            chosen[row] = _draw(logits[row], request)
    return [int(token) for token in chosen.tolist()]


def _draw(logits: Tensor, request: Request) -> Tensor:
    """Draw in proportion to probability, as the largest ratio of probability to exponential noise, without sorting."""
    if request.generator is None:
        request.generator = torch.Generator(device=logits.device)
        if request.sampling.seed is None:
            request.generator.seed()
        else:
            request.generator.manual_seed(request.sampling.seed)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = torch.softmax((scores - scores.max()) / request.sampling.temperature, dim=-1)
    if request.sampling.top_p < 1:
        probabilities = _nucleus(probabilities, request.sampling.top_p)
    noise = torch.empty_like(probabilities).exponential_(generator=request.generator)
    return (probabilities / noise).argmax()


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the most likely tokens that together reach `top_p`; the most likely one is always kept."""
    ordered, index = probabilities.sort(descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0
    return torch.zeros_like(probabilities).scatter(0, index, ordered)
