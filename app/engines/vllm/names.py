"""The ids a request goes by: vLLM decorates what the client sent, and operators know only that."""

from __future__ import annotations

import re

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
