"""A request of vLLM's as core reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.app.engines.vllm.adapters import Adapters
from kvferry.core.keys import tenant_digest

_INDEX_BY_PREFIX = {
    "cmpl-": re.compile(r"-\d+$"),
    "chatcmpl-": re.compile(r"_\d+$"),
    "generate-tokens-": None,
}
"""What the API puts in front, and how it numbers the prompts of one call."""
_CHILD = re.compile(r"^\d+_")
"""Each of several answers to one prompt is a request."""
_BEAM = re.compile(r"-[0-9a-f]{32}-beam-\d+$")
"""And so is each step of each beam."""
_RANDOM = re.compile(r"-[0-9a-f]{8}$")


def aliases_of(request_id: str) -> tuple[str, ...]:
    """What is left of vLLM's request id after each kind of decoration is taken off, the least stripped first.

    `cmpl-ID-0-1a2b3c4d` is known as `cmpl-ID-0`, `cmpl-ID`, `ID-0-1a2b3c4d`, `ID-0` and `ID`.
    """
    found: list[str] = []
    for whole in dict.fromkeys((request_id, _CHILD.sub("", request_id))):
        prefix = next((prefix for prefix in _INDEX_BY_PREFIX if whole.startswith(prefix)), "")
        index = _INDEX_BY_PREFIX.get(prefix)
        for stem in dict.fromkeys((whole, whole.removeprefix(prefix))):
            plain = _RANDOM.sub("", stem)
            single = _BEAM.sub("", plain)
            found += [stem, plain, single]
            if index is not None:
                found.append(index.sub("", single))
    return tuple(name for name in dict.fromkeys(found) if name and name != request_id)


class VllmRequest:
    """Wraps vLLM's own, live request object; satisfies `kvferry.core.engine_api.EngineRequest`."""

    __slots__ = (
        "_adapter",
        "_adapters",
        "_hashes",
        "aliases",
        "lora",
        "num_preemptions",
        "priority",
        "request",
        "request_id",
        "tenant",
    )

    def __init__(self, request: Any, adapters: Adapters) -> None:
        self.request = request
        self._adapters = adapters
        self._adapter = None if request.lora_request is None else adapters.find(request.lora_request)
        self._hashes: list[bytes] = []
        self.request_id: str = request.request_id
        self.aliases: tuple[str, ...] = aliases_of(self.request_id)
        self.tenant = tenant_digest(request.cache_salt)
        self.lora: str | None = None if request.lora_request is None else request.lora_request.lora_name
        self.priority: int = request.priority
        self.num_preemptions: int = request.num_preemptions
        """As many as core was told of."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return int(self.request.num_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One chained hash for each full block, as a live list. Tokens still being sampled are not in it."""
        theirs: Sequence[bytes] = self.request.block_hashes
        if self._adapter is None:
            return theirs
        suffix = self._adapter.suffix
        if suffix is None:
            return ()
        known = len(self._hashes)
        # vLLM takes tokens back where a streaming session goes on. Hashes are chained: the last speaks for all.
        if known > len(theirs) or (known and theirs[known - 1] + suffix != self._hashes[-1]):
            self._hashes.clear()
        self._hashes += self._adapters.lengthen(theirs[len(self._hashes) :], suffix)
        return self._hashes

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client sent."""
        params: Mapping[str, Any] | None = self.request.kv_transfer_params
        return params
