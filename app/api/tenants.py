"""Tenants in what operators write: a digest may be shown, and what is none may be the secret itself."""

from __future__ import annotations

import re

_DIGEST_GLOB = re.compile(r"[0-9a-f*?\[\]!-]+", re.ASCII)


def is_digest_glob(text: str) -> bool:
    """Whether a text is made of hex digits and wildcards only, as a glob of a tenant's digest is."""
    return _DIGEST_GLOB.fullmatch(text) is not None
