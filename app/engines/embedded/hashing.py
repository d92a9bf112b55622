"""Chained block hashes: the content address of a full block, over all tokens up to its end and everything else that
affects its KV.

The chain starts from a fixed seed and hashes little-endian token ids, so that equal prefixes have equal hashes in every
process and on every machine. A cache salt or an adapter starts another chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 32
HASH_SEED = b"kvferry/blocks/1"


def chain_root(cache_salt: str | None, lora: str | None) -> bytes:
    """Return the parent hash of a request's first block. Parts are length-prefixed, so that no two pairs have equal
    roots.
    """
    root = hashlib.blake2b(HASH_SEED, digest_size=HASH_BYTES)
    for part in (cache_salt, lora):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        root.update((-1 if part is None else len(data)).to_bytes(8, "little", signed=True))
        root.update(data)
    return root.digest()


def extend_chain(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, first_token: int = 0
) -> None:
    """Append the hashes of full blocks that `hashes` lacks; `token_ids[0]` is token `first_token`."""
    num_full = (first_token + len(token_ids)) // block_size
    start = len(hashes) * block_size - first_token
    if num_full <= len(hashes):
        return
    data = np.asarray(token_ids[start : num_full * block_size - first_token], dtype="<u4").tobytes()
    parent = hashes[-1] if hashes else root
    step = block_size * 4
    for offset in range(0, len(data), step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
