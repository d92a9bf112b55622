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

from app.engines.digests import DigestCache, FileUnknown
from app.engines.revision import digest_of_files

_log = logging.getLogger(__name__)

SUFFIX_BYTES = 16


class Adapter:
    """An adapter as it was loaded once."""

    def __init__(self, name: str, path: str, number: int) -> None:
        self.name = name
        self.path = path
        self.number = number
        self.digest: bytes | None = None
        self.is_doubtful = False

    @property
    def suffix(self) -> bytes | None:
        """What lengthens the hashes of its blocks; None while nobody knows it, or once nobody can."""
        return None if self.is_doubtful else self.digest


class Adapters:
    """The adapters of an engine's requests, and which of vLLM's hashes are of blocks computed with one.

    On the engine's thread, but for what reads files.
    """

    def __init__(self, start: str, max_hashes: int, digests: DigestCache) -> None:
        """`start` tells this start of the engine from all others; so many hashes are remembered."""
        self._digests = digests
        self._start = start
        self._max_hashes = max_hashes
        self._lock = threading.Lock()
        self._loaded: dict[tuple[str, str], dict[int, Adapter]] = {}
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, lora: Any) -> Adapter:
        """The adapter of a request, from vLLM's `LoRARequest`."""
        name, path, number = str(lora.lora_name), str(lora.lora_path), int(lora.lora_int_id)
        with self._lock:
            loads = self._loaded.setdefault((name, path), {})
            found = loads.get(number)
            if found is None:
                found = loads[number] = Adapter(name, path, number)
                threading.Thread(target=self._read, args=(found,), name="kvferry-adapter", daemon=True).start()
            if lora.load_inplace:
                self._doubt(found)
        return found

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
        try:
            found = digest_of_files(Path(adapter.path).expanduser(), self._digests)
        except (FileUnknown, RuntimeError) as error:
            _log.warning("LoRA adapter %s: none of its blocks is stored, since %s", adapter.name, error)
            return
        if found is None:
            # It is on the hub, and all that is known is that this load of it stays what it is.
            found = f"{self._start}-{adapter.path}-{adapter.number}"
        with self._lock:
            adapter.digest = hashlib.sha256(found.encode()).digest()[:SUFFIX_BYTES]
            known = {load.digest for load in self._loaded[adapter.name, adapter.path].values()} - {None}
            if len(known) > 1:
                self._doubt(adapter)

    def _doubt(self, adapter: Adapter) -> None:
        """vLLM's cache may hold blocks of other weights under the very hashes of this adapter's."""
        loads = self._loaded[adapter.name, adapter.path].values()
        if not all(load.is_doubtful for load in loads):
            for load in loads:
                load.is_doubtful = True
            _log.warning(
                "LoRA adapter %s was loaded again from %s: vLLM does not tell its blocks from those of the weights "
                "before, so none is stored any more; load other weights from another path",
                adapter.name,
                adapter.path,
            )
