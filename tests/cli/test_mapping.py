"""From a trace to prompts: equal ids are equal prefixes, whatever the order, and lengths scale."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.app.replay.report import percentile
from kvferry.app.replay.trace import FIRST_TOKEN_ID, LAST_TOKEN_ID, Mapping, TraceRequest, hash_run, map_request

HASH_IDS = st.lists(st.integers(0, 50), min_size=1, max_size=20)


def request(hash_ids: list[int], last: int = 512, output: int = 100) -> TraceRequest:
    return TraceRequest(0.0, 512 * (len(hash_ids) - 1) + last, output, tuple(hash_ids))


@given(HASH_IDS, HASH_IDS, st.integers(1, 64), st.integers(0, 3))
def test_common_ids_are_a_common_prefix(one: list[int], two: list[int], tokens: int, seed: int) -> None:
    mapping = Mapping(tokens, 8, seed)
    first, second = (map_request(request(ids), mapping).prompt for ids in (one, two))
    common = next(
        (i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two))
    )
    assert first[: common * tokens] == second[: common * tokens]
    assert len(first) == len(one) * tokens
    assert all(FIRST_TOKEN_ID <= token <= LAST_TOKEN_ID for token in first)


@given(HASH_IDS, st.integers(1, 512), st.integers(1, 512))
def test_a_partial_block_is_a_prefix_of_the_full_one_and_never_empty(ids: list[int], last: int, tokens: int) -> None:
    mapping = Mapping(tokens, 8, 0)
    full = map_request(request(ids), mapping).prompt
    part = map_request(request(ids, last), mapping).prompt
    assert full[: len(part)] == part
    assert (len(ids) - 1) * tokens < len(part) <= len(full)


@given(HASH_IDS, st.integers(0, 5000), st.integers(1, 64), st.integers(2, 200))
def test_prompt_and_output_fit_the_context(ids: list[int], output: int, most: int, context: int) -> None:
    whole = map_request(request(ids, output=output), Mapping(16, most, 0))
    mapped = map_request(request(ids, output=output), Mapping(16, most, 0, context))
    assert len(mapped.prompt) + mapped.output_tokens <= context
    assert mapped.prompt
    assert 1 <= mapped.output_tokens <= most
    assert mapped.truncated == (len(mapped.prompt) < len(whole.prompt))
    assert whole.prompt[: len(mapped.prompt)] == mapped.prompt


def test_hash_run_tokens_are_stable() -> None:
    """Two versions of kvferry replay the same tokens, so that their numbers can be compared."""
    assert hash_run(0, 0, 8) == (85, 48, 228, 78, 157, 121, 33, 224)
    assert hash_run(12345, 42, 4) == (160, 99, 110, 55)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50).map(sorted), st.integers(1, 100))
def test_percentiles(ordered: list[float], percent: int) -> None:
    value = percentile(ordered, percent)
    assert sum(item <= value for item in ordered) * 100 >= percent * len(ordered)
    assert sum(item < value for item in ordered) * 100 < percent * len(ordered)
