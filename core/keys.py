"""Keys of blocks, and the identity of the request that stored a block.

A key is a block hash and a group index, as bytes. Equal keys mean equal bytes. The hash comes from the engine and is
chained over the prefix; the group index separates the groups of one model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

Key = bytes

GROUP_BYTES = 1
MAX_NAME_CHARS = 1024
"""Length of names in a `RequestIdentity`: an engine's request ids may be longer, and are cut."""
MAX_ALIASES = 16
"""Other ids of one request; vLLM's requests have the most."""
MAX_SESSION_CHARS = 256
"""Length of a session's id; a request with a longer one has no session."""
TENANT_HEX_DIGITS = 16
TENANT_PATTERN = f"^[0-9a-f]{{{TENANT_HEX_DIGITS}}}$"
RANDOM_SEED = "random-"
"""Start of `hash_seed` in the fingerprint of an engine that draws the seed of its hashes at each start."""


def make_keys(block_hashes: Iterable[bytes], group: int) -> list[Key]:
    """Return the keys of one group's blocks, in the order of their hashes."""
    suffix = group.to_bytes(GROUP_BYTES, "little")
    return [block_hash + suffix for block_hash in block_hashes]


def hash_of(key: Key) -> bytes:
    """Return the block hash of a key."""
    return key[:-GROUP_BYTES]


def group_of(key: Key) -> int:
    """Return the group index of a key."""
    return key[-1]


def is_tenant_digest(text: object) -> bool:
    """Return whether a value is the public name of a tenant."""
    return isinstance(text, str) and re.fullmatch(TENANT_PATTERN, text) is not None


def tenant_digest(cache_salt: str | None) -> str | None:
    """Return the public name of a tenant: 16 hex digits of the SHA-256 of its cache salt, which is a secret."""
    if cache_salt is None:
        return None
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:TENANT_HEX_DIGITS]


class SessionKey(NamedTuple):
    """Name of a session: ids are chosen by clients, so that those of two tenants are two sessions."""

    tenant: str | None
    session: str


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Identity of the request that stored a block, shared by all its blocks. `tenant` is a digest.

    `request_id` is empty for a recovered block whose request is unknown.
    """

    request_id: str
    tenant: str | None = None
    lora: str | None = None
    aliases: tuple[str, ...] = ()
    session: str | None = None

    @property
    def session_key(self) -> SessionKey | None:
        """The request's session, None without one."""
        return None if self.session is None else SessionKey(self.tenant, self.session)


def is_session(text: object) -> bool:
    """Return whether a value can be the id of a session: printable, and not what clients remove from paths."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_SESSION_CHARS:
        return False
    return text.isprintable() and text not in (".", "..")


def read_identity(
    request_id: object, tenant: object, lora: object, aliases: object, session: object = None
) -> RequestIdentity:
    """Return the identity that a file or database holds. Raises `ValueError` for values that no request has."""
    if not isinstance(aliases, list) or len(aliases) > MAX_ALIASES:
        raise ValueError("aliases are no short list")
    if not (tenant is None or is_tenant_digest(tenant)) or not all(
        isinstance(name, str) and len(name) <= MAX_NAME_CHARS and is_encodable(name)
        for name in (request_id, "" if lora is None else lora, *aliases)
    ):
        raise ValueError("a name is no short text")
    if session is not None and not is_session(session):
        raise ValueError("a session is no short text")
    return RequestIdentity(request_id, tenant, lora, tuple(aliases), session)  # type: ignore[arg-type]  # by the checks


def is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates, so that responses and databases take it."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Globs that must all match, None matching everything. A request matches by its id or by any alias.

    A missing tenant or LoRA has an empty name; a request without a session matches no glob of sessions. A block whose
    request is unknown matches, as it may be one of those that the operator means.
    """

    request: str | None = None
    tenant: str | None = None
    lora: str | None = None
    session: str | None = None

    def matches(self, origin: RequestIdentity) -> bool:
        """Return whether blocks of this request match."""
        return not origin.request_id or self.matches_names(origin)

    def matches_names(self, origin: RequestIdentity) -> bool:
        """Return whether the names of this request match."""
        return (
            _any_matches(self.request, (origin.request_id, *origin.aliases))
            and _any_matches(self.tenant, (origin.tenant or "",))
            and _any_matches(self.lora, (origin.lora or "",))
            and _any_matches(self.session, () if origin.session is None else (origin.session,))
        )


def _any_matches(glob: str | None, names: Sequence[str]) -> bool:
    return glob is None or any(fnmatchcase(name, glob) for name in names)
