"""Where prompts leave earlier ones, beside a comparison with every earlier prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import partings
from kvferry.core.keys import RequestIdentity
from kvferry.core.partings import Partings, PrefixOutcome, PrefixStory
from kvferry.core.pool.events import RequestBlocks, ResetEvent

TOKENS = 16


def keys_of(prompt: Sequence[int]) -> list[bytes]:
    """Return a key for each part, which stands for all parts before it too."""
    return [hashlib.sha256(bytes(prompt[:end])).digest() for end in range(1, len(prompt) + 1)]


def ended(
    number: int, prompt: Sequence[int], answer: Sequence[int] = (), *, served: int = 0, time_s: float = 1.0
) -> RequestBlocks:
    """A request whose prompt and answer consist of slots with these contents; the prompt has a token more."""
    keys = keys_of([*prompt, *answer])
    origin = RequestIdentity(f"r{number}")
    return RequestBlocks(time_s, number, origin, keys, len(prompt) * TOKENS + 1, 1, len(keys), served)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def expected(prompt: Sequence[int], earlier: Sequence[Sequence[int]]) -> tuple[PrefixOutcome, int, str | None, int]:
    """Return outcome, shared slots, the earlier request and ways, by comparing with each earlier prompt."""
    shared = max((common(prompt, one) for one in earlier), default=0)
    if not shared:
        return PrefixOutcome.NEW, 0, None, 0
    latest = max(at for at, one in enumerate(earlier) if common(prompt, one) == shared)
    name = f"r{latest + 1}"
    if shared == len(prompt):
        return PrefixOutcome.REPEATED, shared, name, 0
    ways = {one[shared] for one in [*earlier, prompt] if len(one) > shared and common(prompt, one) >= shared}
    outcome = PrefixOutcome.CONTINUED if len(earlier[latest]) == shared else PrefixOutcome.PARTED
    return outcome, shared, name, len(ways)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=25))
def test_stories_equal_those_of_comparing_with_all_earlier_prompts(prompts: list[list[int]]) -> None:
    found = Partings(TOKENS)
    for number, prompt in enumerate(prompts, start=1):
        found.read([ended(number, prompt)])
        story = found.story(number)
        assert story is not None
        outcome, shared, earlier, ways = expected(prompt, prompts[: number - 1])
        position = shared * TOKENS if outcome is PrefixOutcome.PARTED else None
        assert story == PrefixStory(outcome, shared * TOKENS, position, exact=False, earlier=earlier, ways=ways)


def test_a_prompt_that_begins_with_an_answer_continues_its_request() -> None:
    found = Partings(TOKENS)
    found.read([ended(1, [1, 2], [3, 4]), ended(2, [1, 2, 3, 4, 5]), ended(3, [1, 2, 3, 9])])
    stories = [found.story(number) for number in (2, 3)]
    assert [(one.outcome, one.shared_tokens, one.earlier) for one in stories if one is not None] == [
        (PrefixOutcome.CONTINUED, 64, "r1"),
        (PrefixOutcome.PARTED, 48, "r2"),
    ]


def test_tokens_behind_a_parting_count_unless_they_were_served() -> None:
    found = Partings(TOKENS)
    found.read([ended(1, [1, 2, 3]), ended(2, [1, 2, 3, 4])])
    assert found.parted_tokens == 0, "nothing has parted"
    found.read([ended(3, [1, 5, 6], served=16)])
    assert found.parted_tokens == 33
    # The prefix was computed too, for another reason.
    found.read([ended(4, [1, 2, 7], served=0)])
    assert found.parted_tokens == 33 + 17
    found.read([ended(5, [1, 8, 9], served=48)])
    assert found.parted_tokens == 33 + 17 + 1


def test_ways_older_than_an_hour_do_not_count() -> None:
    found = Partings(TOKENS)
    found.read([ended(1, [1, 2]), ended(2, [1, 3], time_s=2.0), ended(3, [1, 4], time_s=3.0)])
    later = 4.0 + partings.WAYS_S
    found.read([ended(4, [1, 5], time_s=later)])
    stories = [found.story(number) for number in (3, 4)]
    assert [one.ways for one in stories if one is not None] == [3, 1]


def test_a_reset_keeps_prompts_and_short_prompts_have_no_story() -> None:
    found = Partings(TOKENS)
    found.read([ended(1, [1, 2]), ResetEvent(1.0, 1, 0), ended(2, [1, 3]), ended(3, [])])
    story = found.story(2)
    assert story is not None
    assert story.outcome is PrefixOutcome.PARTED
    assert found.story(3) is None
    assert found.story(99) is None


def test_a_request_that_is_too_old_is_found_without_its_name() -> None:
    found = Partings(TOKENS)
    found.read([ended(1, [1, 2])])
    last = 1 + partings.MAX_REQUESTS
    found.read([ended(number, [200])._replace(keys=[b"%032d" % number]) for number in range(2, last + 1)])
    assert [found.story(number) is None for number in (1, 2)] == [True, False]
    found.read([ended(last + 1, [1, 2, 3])])
    assert found.story(last + 1) == PrefixStory(PrefixOutcome.CONTINUED, 32, None, False, None, 1)


def test_fewer_requests_of_long_prompts_are_kept() -> None:
    found = Partings(TOKENS)
    num_keys = partings.MAX_CHAIN_KEYS // 2
    for number in range(1, 4):
        keys = [b"%016d%016d" % (number, slot) for slot in range(num_keys)]
        found.read([ended(number, [1])._replace(keys=keys)])
    assert [found.story(number) is None for number in (1, 2, 3)] == [True, False, False]
