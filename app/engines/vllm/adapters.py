"""LoRA adapters identified by the content of their files; vLLM's block hashes identify them by name and path only.

The block hashes of a request with an adapter are extended by a digest of the adapter's files. A thread reads the files;
until it is done, and if it fails, the request's blocks are neither stored nor looked up.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from kvferry.app.engines.identity import DigestCache, FileUnknown, digest_of_files

_log = logging.getLogger(__name__)

SUFFIX_BYTES = 16

_MAX_ADAPTERS = 1000
"""Limit of adapters kept in addition to those of live requests."""
_MAX_LOADS = 16
"""Limit of loads kept for each adapter."""
_FILTER_BITS = 1 << 20
_FILTER_PROBES = 4


class AdapterLoads:
    """All loads of one name and path, which have the same block hashes in vLLM."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.digest: bytes | None = None
        """Digest of the loads whose files have been read."""
        self.is_ambiguous = False
        """Whether vLLM's cache may hold blocks of different weights under the same hashes."""
        self.by_number: OrderedDict[int, Adapter] = OrderedDict()


class Adapter:
    """One load of a LoRA adapter."""

    def __init__(self, loads: AdapterLoads, number: int) -> None:
        self.loads = loads
        self.number = number
        self.digest: bytes | None = None

    @property
    def suffix(self) -> bytes | None:
        """Suffix for the hashes of its blocks; None until the files are read, and when the weights are ambiguous."""
        return None if self.loads.is_ambiguous else self.digest


class AdapterFilter:
    """Bloom filter of adapters that were used before, in a fixed amount of memory."""

    def __init__(self) -> None:
        self._bits = bytearray(_FILTER_BITS // 8)

    def add(self, name: str, path: str) -> None:
        """Add an adapter's name and path."""
        for bit in self._bits_of(name, path):
            self._bits[bit // 8] |= 1 << bit % 8

    def may_contain(self, name: str, path: str) -> bool:
        """Return whether an adapter was added; true for a few that were not."""
        return all(self._bits[bit // 8] >> bit % 8 & 1 for bit in self._bits_of(name, path))

    def _bits_of(self, name: str, path: str) -> list[int]:
        digest = hashlib.sha256(f"{len(name)}:{name}{path}".encode()).digest()
        return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") % _FILTER_BITS for i in range(_FILTER_PROBES)]


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
            max_adapters: Limit of adapters kept. One that is used again after it was removed is ambiguous, because
                vLLM's cache may still hold blocks of its earlier weights.
        """
        self._digests = digests
        self._start_id = start_id
        self._max_hashes = max_hashes
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, str], AdapterLoads] = OrderedDict()
        # Loads evicted from `_recent`, as long as a live request or a reading thread refers to one of them.
        self._in_use: WeakValueDictionary[tuple[str, str], AdapterLoads] = WeakValueDictionary()
        self._evicted = AdapterFilter()
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, lora: Any) -> Adapter:
        """Return the adapter of a request, given vLLM's `LoRARequest`."""
        name, path, number = str(lora.lora_name), str(lora.lora_path), int(lora.lora_int_id)
        with self._lock:
            loads = self._loads_of(name, path)
            found = loads.by_number.get(number)
            if found is None:
                found = loads.by_number[number] = Adapter(loads, number)
                if len(loads.by_number) > _MAX_LOADS:
                    loads.by_number.popitem(last=False)
                if not loads.is_ambiguous:
                    threading.Thread(target=self._read, args=(found,), name="kvferry-adapter", daemon=True).start()
            if lora.load_inplace:
                self._set_ambiguous(loads)
        return found

    def _loads_of(self, name: str, path: str) -> AdapterLoads:
        """Return the loads of a name and path and make them the most recently used. Requires: lock held."""
        key = name, path
        loads = self._recent.get(key) or self._in_use.get(key)
        if loads is None:
            loads = AdapterLoads(name, path)
            if self._evicted.may_contain(name, path):
                self._set_ambiguous(loads)
        self._recent[key] = loads
        self._recent.move_to_end(key)
        if len(self._recent) > self._max_adapters:
            oldest, evicted = self._recent.popitem(last=False)
            self._evicted.add(*oldest)
            # Break the reference cycle, so that the loads are freed with the last request or thread that uses them.
            evicted.by_number.clear()
            self._in_use[oldest] = evicted
        return loads

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

    def _read(self, adapter: Adapter) -> None:
        loads = adapter.loads
        try:
            content = digest_of_files(Path(loads.path).expanduser(), self._digests)
        except (FileUnknown, RuntimeError) as error:
            _log.warning("LoRA adapter is not offloaded, its files cannot be read: %s: %s", loads.name, error)
            return
        if content is None:
            # For an adapter on the hub, only this load of it is known to stay unchanged.
            content = f"{self._start_id}-{loads.path}-{adapter.number}"
        with self._lock:
            adapter.digest = hashlib.sha256(content.encode()).digest()[:SUFFIX_BYTES]
            loads.digest = loads.digest or adapter.digest
            if loads.digest != adapter.digest:
                self._set_ambiguous(loads)

    def _set_ambiguous(self, loads: AdapterLoads) -> None:
        """Stop offloading an adapter whose blocks vLLM's cache may mix with those of other weights."""
        if not loads.is_ambiguous:
            loads.is_ambiguous = True
            _log.warning(
                "LoRA adapter is no longer offloaded, it was loaded again: %s from %s; vLLM's block hashes do not "
                "distinguish the weights, so load other weights from another path",
                loads.name,
                loads.path,
            )
