"""Operators know requests by the ids that clients sent, whatever vLLM makes of them."""

from __future__ import annotations

import pytest

from kvferry.app.engines.vllm.requests import aliases_of

RANDOM = "-1a2b3c4d"
BEAM = "-0123456789abcdef0123456789abcdef-beam-3"


@pytest.mark.parametrize(
    "vllms",
    [
        f"mine{RANDOM}",
        f"cmpl-mine-0{RANDOM}",
        f"cmpl-mine-12{RANDOM}",
        f"chatcmpl-mine{RANDOM}",
        # Several answers to one prompt are as many requests, and so are the steps of a beam search.
        f"1_cmpl-mine-0{RANDOM}",
        f"0_chatcmpl-mine{RANDOM}",
        f"2_mine{RANDOM}",
        f"cmpl-mine{BEAM}{RANDOM}",
        f"chatcmpl-mine{BEAM}{RANDOM}",
        # Several conversations in one call, and tokens instead of text.
        f"chatcmpl-mine_3{RANDOM}",
        f"generate-tokens-mine{RANDOM}",
    ],
)
def test_aliases_when_vllm_decorates_an_id_contain_the_clients_id(vllms: str) -> None:
    found = aliases_of(vllms)
    assert "mine" in found
    assert vllms not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("sent", ["a-1", "a-1a2b3c4d", "2_a", "cmpl-a", "a_3", "job-0123456789abcdef0123456789abcdef"])
def test_aliases_when_an_id_looks_decorated_contain_it_whole(sent: str) -> None:
    for vllms in (f"cmpl-{sent}-0", f"chatcmpl-{sent}", sent, f"1_chatcmpl-{sent}"):
        assert sent in aliases_of(vllms + RANDOM)
