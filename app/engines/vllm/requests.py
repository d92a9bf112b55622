"""vLLM's requests as core's `EngineRequest`, and the ids that clients gave them."""

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
"""Prefixes that vLLM's API adds to request ids, and the suffix that numbers the prompts of one API call."""
_SAMPLE = re.compile(r"^\d+_")
"""Prefix of each of several samples for one prompt, which are separate requests."""
_BEAM = re.compile(r"-[0-9a-f]{32}-beam-\d+$")
"""Suffix of each step of each beam, which are separate requests as well."""
_RANDOM = re.compile(r"-[0-9a-f]{8}$")


def aliases_of(request_id: str) -> tuple[str, ...]:
    """Return the ids that remain when vLLM's prefixes and suffixes are removed one by one, the longest first.

    `cmpl-ID-0-1a2b3c4d` has the aliases `cmpl-ID-0`, `cmpl-ID`, `ID-0-1a2b3c4d`, `ID-0` and `ID`.
    """
    found: list[str] = []
    for whole in dict.fromkeys((request_id, _SAMPLE.sub("", request_id))):
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
    """A live vLLM request with the interface `kvferry.core.engine_api.EngineRequest`."""

    def __init__(self, request: Any, adapters: Adapters) -> None:
        lora = request.lora_request
        self.request = request
        self._adapters = adapters
        self._adapter = None if lora is None else adapters.find(lora)
        self._hashes: list[bytes] = []
        self.request_id: str = request.request_id
        self.aliases: tuple[str, ...] = aliases_of(self.request_id)
        self.tenant = tenant_digest(request.cache_salt)
        self.lora: str | None = None if lora is None else lora.lora_name
        self.priority: int = request.priority
        self.num_preemptions: int = request.num_preemptions
        """Number of preemptions that core knows of."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt and the output so far."""
        return int(self.request.num_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the request's full blocks, a live list; empty while its adapter's digest is not known."""
        hashes: Sequence[bytes] = self.request.block_hashes
        if self._adapter is None:
            return hashes
        suffix = self._adapter.suffix
        if suffix is None:
            return ()
        known = len(self._hashes)
        # A streaming session can remove tokens. Since hashes are chained, comparing the last one is sufficient.
        if known > len(hashes) or (known and hashes[known - 1] + suffix != self._hashes[-1]):
            self._hashes.clear()
        self._hashes += self._adapters.extend_hashes(hashes[len(self._hashes) :], suffix)
        return self._hashes

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Parameters sent by the client."""
        params: Mapping[str, Any] | None = self.request.kv_transfer_params
        return params
