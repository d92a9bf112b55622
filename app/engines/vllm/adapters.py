"""LoRA adapters told apart by what is in their files. vLLM's own hashes know an adapter by name and path only.

The hashes of such a request's blocks are lengthened by a digest of its adapter. Files are read on a thread of their
own; until that is done, and where it cannot be done, the request's blocks are neither stored nor looked for.
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

from kvferry.app.engines.digests import DigestCache, FileUnknown
from kvferry.app.engines.revision import digest_of_files

_log = logging.getLogger(__name__)

SUFFIX_BYTES = 16


_MAX_ADAPTERS = 1000
"""Adapters remembered beyond those of live requests."""
_MAX_LOADS = 16
"""Loads remembered of each adapter."""
_FILTER_BITS = 1 << 20
_FILTER_PROBES = 4


class AdapterLoads:
    """All loads of one name and path, which vLLM's hashes do not tell apart."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.digest: bytes | None = None
        """The digest that all loads had whose files were read."""
        self.is_doubtful = False
        self.by_number: OrderedDict[int, Adapter] = OrderedDict()


class Adapter:
    """An adapter as it was loaded once."""

    def __init__(self, loads: AdapterLoads, number: int) -> None:
        self.loads = loads
        self.number = number
        self.digest: bytes | None = None

    @property
    def suffix(self) -> bytes | None:
        """What lengthens the hashes of its blocks; None while nobody knows it, or once nobody can."""
        return None if self.loads.is_doubtful else self.digest


class SeenNames:
    """Names and paths that were added, in a fixed amount of memory: a Bloom filter, which forgets nothing."""

    def __init__(self) -> None:
        self._bits = bytearray(_FILTER_BITS // 8)

    def add(self, name: str, path: str) -> None:
        """Add one."""
        for place in self._places(name, path):
            self._bits[place // 8] |= 1 << place % 8

    def may_have(self, name: str, path: str) -> bool:
        """Whether it was added; sometimes also for one that was not."""
        return all(self._bits[place // 8] >> place % 8 & 1 for place in self._places(name, path))

    def _places(self, name: str, path: str) -> list[int]:
        digest = hashlib.sha256(f"{len(name)}:{name}{path}".encode()).digest()
        return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") % _FILTER_BITS for i in range(_FILTER_PROBES)]


class Adapters:
    """The adapters of an engine's requests, and which of vLLM's hashes are of blocks computed with one.

    On the engine's thread, but for what reads files.
    """

    def __init__(self, start: str, max_hashes: int, digests: DigestCache, max_adapters: int = _MAX_ADAPTERS) -> None:
        """`start` tells this start of the engine from all others; so many hashes and adapters are remembered.

        A forgotten adapter that is used again is doubtful: vLLM's cache may still hold blocks of its weights before.
        """
        self._digests = digests
        self._start = start
        self._max_hashes = max_hashes
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, str], AdapterLoads] = OrderedDict()
        # Those that are not recent, as long as a live request or a reading thread has one of their loads.
        self._in_use: WeakValueDictionary[tuple[str, str], AdapterLoads] = WeakValueDictionary()
        self._forgotten = SeenNames()
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, lora: Any) -> Adapter:
        """The adapter of a request, from vLLM's `LoRARequest`."""
        name, path, number = str(lora.lora_name), str(lora.lora_path), int(lora.lora_int_id)
        with self._lock:
            loads = self._loads_of(name, path)
            found = loads.by_number.get(number)
            if found is None:
                found = loads.by_number[number] = Adapter(loads, number)
                if len(loads.by_number) > _MAX_LOADS:
                    loads.by_number.popitem(last=False)
                if not loads.is_doubtful:
                    threading.Thread(target=self._read, args=(found,), name="kvferry-adapter", daemon=True).start()
            if lora.load_inplace:
                self._doubt(loads)
        return found

    def _loads_of(self, name: str, path: str) -> AdapterLoads:
        """The loads of a name and path, from now on the most recently used. Requires: lock held."""
        key = name, path
        loads = self._recent.get(key) or self._in_use.get(key)
        if loads is None:
            loads = AdapterLoads(name, path)
            if self._forgotten.may_have(name, path):
                self._doubt(loads)
        self._recent[key] = loads
        self._recent.move_to_end(key)
        if len(self._recent) > self._max_adapters:
            oldest, gone = self._recent.popitem(last=False)
            self._forgotten.add(*oldest)
            # Without the cycle, the loads go with the last request or thread that has one of them.
            gone.by_number.clear()
            self._in_use[oldest] = gone
        return loads

    def lengthen(self, hashes: Sequence[bytes], suffix: bytes) -> list[bytes]:
        """Our hashes for vLLM's, of blocks computed with an adapter. They are remembered."""
        ours = [block_hash + suffix for block_hash in hashes]
        self._hashes.update(zip(hashes, ours, strict=True))
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
        return ours

    def ours(self, block_hash: bytes) -> bytes:
        """Our hash for one of vLLM's."""
        return self._hashes.get(block_hash, block_hash)

    def _read(self, adapter: Adapter) -> None:
        loads = adapter.loads
        try:
            found = digest_of_files(Path(loads.path).expanduser(), self._digests)
        except (FileUnknown, RuntimeError) as error:
            _log.warning("LoRA adapter %s: none of its blocks is stored, since %s", loads.name, error)
            return
        if found is None:
            # It is on the hub, and all that is known is that this load of it stays what it is.
            found = f"{self._start}-{loads.path}-{adapter.number}"
        with self._lock:
            adapter.digest = hashlib.sha256(found.encode()).digest()[:SUFFIX_BYTES]
            loads.digest = loads.digest or adapter.digest
            if loads.digest != adapter.digest:
                self._doubt(loads)

    def _doubt(self, loads: AdapterLoads) -> None:
        """vLLM's cache may hold blocks of other weights under the very hashes of these loads."""
        if not loads.is_doubtful:
            loads.is_doubtful = True
            _log.warning(
                "LoRA adapter %s was loaded again from %s: vLLM does not tell its blocks from those of the weights "
                "before, so none is stored any more; load other weights from another path",
                loads.name,
                loads.path,
            )
