"""vLLM's requests as core's `EngineRequest`, with the ids that clients gave them and their LoRA adapters.

vLLM's block hashes identify an adapter by name and path only, so the hashes of a request with an adapter are extended
by a digest of the adapter's files. A thread reads the files; until it is done, and if it fails, the request's blocks
are neither stored nor looked up.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.app.engines.identity import DigestCache, FileUnknown, digest_of_files
from kvferry.core.engine_api import UnknownAdapter
from kvferry.core.keys import MAX_NAME_CHARS, tenant_digest

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import TracedRequest

_log = logging.getLogger(__name__)

SUFFIX_BYTES = 16

_MAX_ADAPTERS = 10_000
"""Limit of adapters that are offloaded, by name and path."""
_MAX_HINT_ACTIONS = 64
"""Actions of one request's KV hints that are counted."""
_MAX_LOADS = 16
"""Limit of loads kept for each adapter."""
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
    names: list[str] = []
    for whole in dict.fromkeys((request_id, _SAMPLE.sub("", request_id))):
        prefix = next((prefix for prefix in _INDEX_BY_PREFIX if whole.startswith(prefix)), "")
        index = _INDEX_BY_PREFIX.get(prefix)
        for stem in dict.fromkeys((whole, whole.removeprefix(prefix))):
            plain = _RANDOM.sub("", stem)
            single = _BEAM.sub("", plain)
            names += [stem, plain, single]
            if index is not None:
                names.append(index.sub("", single))
    return tuple(name for name in dict.fromkeys(names) if name and name != request_id)


class Adapter:
    """All loads of one name and path, which have the same block hashes in vLLM."""

    def __init__(self, name: str, path: str, *, is_ambiguous: bool = False) -> None:
        self.name = name
        self.path = path
        self.digest: bytes | None = None
        """Digest of the loads whose files have been read."""
        self.is_ambiguous = is_ambiguous
        """Whether vLLM's cache may hold blocks of different weights under the same hashes."""
        self.loads: dict[int, bool] = {}
        """Numbers of the latest loads, and whether their files have been read."""

    def suffix(self, number: int) -> bytes | None:
        """Return the suffix for the hashes of a load's blocks; None until its files are read, and if ambiguous."""
        return self.digest if self.loads.get(number) and not self.is_ambiguous else None


class Adapters:
    """LoRA adapters of an engine's requests, and the extended hashes of blocks computed with them.

    Thread: engine, except the reading of files.
    """

    def __init__(self, start_id: str, max_hashes: int, digests: DigestCache, max_adapters: int = _MAX_ADAPTERS) -> None:
        """Create an empty table.

        Args:
            start_id: Identifies this start of the engine.
            max_hashes: Limit of extended hashes kept.
            digests: Cache of file digests.
            max_adapters: Limit of adapters; further ones are not offloaded. None is removed, because vLLM's cache may
                hold blocks of its earlier weights.
        """
        self._digests = digests
        self._start_id = start_id
        self._max_hashes = max_hashes
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._adapters: dict[tuple[str, str], Adapter] = {}
        self._has_logged_limit = False
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, lora: Any) -> Adapter:
        """Return the adapter of a request, given vLLM's `LoRARequest`."""
        name, path, number = str(lora.lora_name), str(lora.lora_path), int(lora.lora_int_id)
        with self._lock:
            adapter = self._adapters.get((name, path)) or self._add(name, path)
            # vLLM 0.31 can read the weights from another place than the path.
            if lora.load_inplace or getattr(lora, "tensorizer_config_dict", None):
                self._set_ambiguous(adapter)
            if not adapter.is_ambiguous and number not in adapter.loads:
                if len(adapter.loads) >= _MAX_LOADS:
                    del adapter.loads[next(iter(adapter.loads))]
                adapter.loads[number] = False
                thread = threading.Thread(
                    target=self._read, args=(adapter, number), name="kvferry-adapter", daemon=True
                )
                thread.start()
        return adapter

    def path_and_suffix(self, name: str) -> tuple[str, bytes]:
        """Return the path and the suffix of the adapter of this name that a request used first.

        Raises:
            UnknownAdapter: No request has used it, or its blocks are not offloaded.
        """
        with self._lock:
            for adapter in self._adapters.values():
                if adapter.name == name and adapter.digest is not None and not adapter.is_ambiguous:
                    return adapter.path, adapter.digest
        raise UnknownAdapter(f"no request has used the adapter {name}, or its blocks are not offloaded")

    def extend_hashes(self, hashes: Sequence[bytes], suffix: bytes) -> list[bytes]:
        """Return vLLM's hashes with an adapter's suffix, and record them for `extended_hash`."""
        extended = [block_hash + suffix for block_hash in hashes]
        self._hashes.update(zip(hashes, extended, strict=True))
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
        return extended

    def extended_hash(self, block_hash: bytes) -> bytes:
        """Return the extended hash recorded for one of vLLM's, or the hash itself."""
        return self._hashes.get(block_hash, block_hash)

    def _add(self, name: str, path: str) -> Adapter:
        """Add an adapter, if the limit allows it. Requires: lock held."""
        if len(self._adapters) < self._max_adapters:
            return self._adapters.setdefault((name, path), Adapter(name, path))
        if not self._has_logged_limit:
            self._has_logged_limit = True
            _log.warning("further LoRA adapters are not offloaded, the limit is reached: %d", self._max_adapters)
        return Adapter(name, path, is_ambiguous=True)

    def _read(self, adapter: Adapter, number: int) -> None:
        try:
            content = digest_of_files(Path(adapter.path).expanduser(), self._digests)
        except (FileUnknown, RuntimeError) as error:
            _log.warning("LoRA adapter is not offloaded, its files cannot be read: %s: %s", adapter.name, error)
            return
        if content is None:
            # For an adapter on the hub, only this load of it is known to stay unchanged.
            content = f"{self._start_id}-{adapter.path}-{number}"
        digest = hashlib.sha256(content.encode()).digest()[:SUFFIX_BYTES]
        with self._lock:
            adapter.digest = adapter.digest or digest
            if adapter.digest != digest:
                self._set_ambiguous(adapter)
            elif number in adapter.loads:
                adapter.loads[number] = True

    def _set_ambiguous(self, adapter: Adapter) -> None:
        """Stop offloading an adapter whose blocks vLLM's cache may mix with those of other weights."""
        if not adapter.is_ambiguous:
            adapter.is_ambiguous = True
            _log.warning(
                "LoRA adapter is no longer offloaded, it was loaded again: %s from %s; vLLM's block hashes do not "
                "distinguish the weights, so load other weights from another path",
                adapter.name,
                adapter.path,
            )


class VllmRequest:
    """A live vLLM request with the interface `kvferry.core.engine_api.EngineRequest`."""

    def __init__(self, request: Any, adapters: Adapters, unhashed: str | None = None) -> None:
        """Create the view of a live request, whose block hashes leave out `unhashed`."""
        lora = request.lora_request
        self.unhashed = unhashed
        self.request = request
        self._adapters = adapters
        self._adapter = None if lora is None else adapters.find(lora)
        self._load_number = 0 if lora is None else int(lora.lora_int_id)
        self._hashes: list[bytes] = []
        self.request_id: str = request.request_id
        self.aliases: tuple[str, ...] = aliases_of(self.request_id[:MAX_NAME_CHARS])
        self.tenant = tenant_digest(request.cache_salt)
        self.lora: str | None = None if lora is None else lora.lora_name
        self.priority: int = request.priority
        # vLLM's servers fill it from the body's field, else the header `X-Session-ID`, else `vllm_xargs`.
        self.session: str | None = request.session_id
        # No release defines an action, and none is executed.
        hints = getattr(request, "kv_hints", None)
        actions = () if hints is None else hints.actions[:_MAX_HINT_ACTIONS]
        self.kv_hint_types: Sequence[str] = [action.action_type for action in actions]
        # vLLM ignores what can be loaded for such a request, as for one that asks for log probabilities of its prompt.
        self.may_load = not request.skip_reading_prefix_cache
        self.trace: TracedRequest | None = None
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
    def token_ids(self) -> Sequence[int]:
        """Token ids of the prompt and the output so far."""
        ids: Sequence[int] = self.request.all_token_ids
        return ids

    @property
    def num_computed_tokens(self) -> int:
        """Number of computed tokens; with asynchronous scheduling also of those in the steps planned so far.

        Drafts count until they are rejected.
        """
        return int(self.request.num_computed_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the request's full blocks, a live list; empty while its adapter's digest is not known."""
        hashes: Sequence[bytes] = self.request.block_hashes
        if self._adapter is None:
            return hashes
        suffix = self._adapter.suffix(self._load_number)
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
