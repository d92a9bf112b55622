"""The ids a request goes by: vLLM decorates what the client sent, and operators know only that."""

from __future__ import annotations

import re

_PREFIXES = ("cmpl-", "chatcmpl-")
_INDEXED = "cmpl-"
"""Only completions number the prompts of a call, and they do so behind the client's id."""
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_INDEX = re.compile(r"-\d+$")


def aliases_of(request_id: str) -> tuple[str, ...]:
    """What is left of vLLM's request id after each kind of decoration is taken off, the least stripped first.

    `cmpl-ID-0-1a2b3c4d` is known as `cmpl-ID-0`, `cmpl-ID`, `ID-0-1a2b3c4d`, `ID-0` and `ID`.
    """
    found: list[str] = []
    stems = [request_id, *(request_id.removeprefix(prefix) for prefix in _PREFIXES if request_id.startswith(prefix))]
    for stem in stems:
        plain = _RANDOM.sub("", stem)
        found += [stem, plain]
        if request_id.startswith(_INDEXED):
            found.append(_INDEX.sub("", plain))
    return tuple(name for name in dict.fromkeys(found) if name and name != request_id)
