"""Breaks: workloads with known ones, each found, and workloads without, in which none is."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core import breaks
from kvferry.core.breaks import ALIGNED_PAIRS, Break, compare
from kvferry.core.keys import RequestIdentity
from kvferry.core.partings import TABLE_BITS, KeepTokenIds, Partings, PrefixOutcome
from kvferry.core.pool.events import RequestBlocks, ResetEvent

TOKENS = 16
Prompt = list[int]


class World:
    """Requests that end one a second, with the token ids that are kept of them."""

    def __init__(self, max_bytes: int = 64 << 20, table_bits: int = TABLE_BITS, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.partings = Partings(TOKENS, table_bits)
        self.partings.read([KeepTokenIds(max_bytes)])
        self.number = 0
        self.now_s = 1000.0

    def text(self, length: int) -> Prompt:
        return [self.rng.randrange(1, 1000) for _ in range(length)]

    def end(
        self,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        *,
        tenant: str | None = None,
        session: str | None = None,
        image: bytes = b"",
        served: int = 0,
        seconds: float = 1.0,
    ) -> int:
        """End a request; what is not a token, as an `image`, changes its keys."""
        self.number += 1
        self.now_s += seconds
        ids = [*prompt, *answer]
        digest = hashlib.sha256((tenant or "").encode())
        keys = []
        for at in range(len(ids) // TOKENS):
            digest.update(b"".join(token.to_bytes(4, "little") for token in ids[at * TOKENS : (at + 1) * TOKENS]))
            if at == 2:
                digest.update(image)
            keys.append(digest.digest())
        origin = RequestIdentity(f"r{self.number}", tenant, session=session)
        self.partings.read(
            [RequestBlocks(self.now_s, self.number, origin, keys, len(prompt), len(answer), len(keys), served, ids)]
        )
        return self.number

    def find(self, window_s: float = 3600.0) -> list[Break]:
        return self.partings.breaks.find(self.now_s, window_s)[1]


def clock(world: World) -> list[tuple[int, int, int]]:
    head, body = world.text(100), world.text(1000)
    return [(100, world.end([*head, *world.text(5), *body, *world.text(30)]), 1000) for _ in range(4)]


def first_tokens(world: World) -> list[tuple[int, int, int]]:
    body = world.text(1000)
    return [(0, world.end([*world.text(3), *body, *world.text(50)]), 1000) for _ in range(4)]


def tools(world: World) -> list[tuple[int, int, int]]:
    head, body = world.text(64), world.text(800)
    kinds = [world.text(120) for _ in range(3)]
    orders = [(0, 1, 2), (1, 0, 2), (0, 1, 2)]
    return [(64, world.end([*head, *chain.from_iterable(kinds[at] for at in order), *body]), 920) for order in orders]


def reasoning(world: World) -> list[tuple[int, int, int]]:
    found = []
    for _ in range(3):
        question, thought, answer = world.text(200), world.text(150), world.text(300)
        world.end(question, [*thought, *answer])
        found.append((200, world.end([*question, *answer, *world.text(60)]), 300))
    return found


def space(world: World) -> list[tuple[int, int, int]]:
    head, body = world.text(300), world.text(700)
    return [(300, world.end([*head, *([7] * (at % 2)), *body]), 700) for at in range(2)]


def truncation(world: World) -> list[tuple[int, int, int]]:
    system, turns = world.text(128), [world.text(200) for _ in range(8)]
    return [(128, world.end([*system, *chain.from_iterable(turns[at : at + 5])]), 800) for at in range(3)]


@pytest.mark.parametrize("workload", [clock, first_tokens, tools, reasoning, space, truncation])
def test_a_known_break_is_found_where_it_is(workload: Callable[[World], list[tuple[int, int, int]]]) -> None:
    world = World()
    ended = workload(world)
    found = world.find()
    assert found, "nothing was found"
    position, _, num_equal = ended[0]
    assert {one.position for one in found} == {position}
    assert all(one.is_exact and not one.is_estimated for one in found)
    num_broken = sum(one.num_requests for one in found)
    # In each of three chats; after the first prompt; of tools, the third prompt has the order of the first again.
    assert num_broken == {reasoning: len(ended), tools: 1}.get(workload, len(ended) - 1)
    # Whole blocks of the equal run: at most one is cut at each end.
    price = sum(one.num_tokens for one in found)
    assert num_broken * (num_equal - 2 * TOKENS) <= price <= num_broken * num_equal
    assert world.partings.breaks.num_bytes <= 64 << 20


def chats_that_branch(world: World) -> None:
    system = world.text(400)
    for _ in range(10):
        world.end([*system, *world.text(world.rng.randrange(20, 300))])


def next_turns(world: World) -> None:
    prompt = world.text(300)
    for _ in range(6):
        answer = world.text(90)
        world.end(prompt, answer)
        prompt = [*prompt, *answer, *world.text(40)]


def repeated_prompts(world: World) -> None:
    prompt = world.text(500)
    for _ in range(5):
        world.end(prompt, world.text(20))


def other_prompts(world: World) -> None:
    for _ in range(12):
        world.end(world.text(300))


@pytest.mark.parametrize("workload", [chats_that_branch, next_turns, repeated_prompts, other_prompts])
def test_no_break_is_invented(workload: Callable[[World], None]) -> None:
    world = World()
    workload(world)
    assert world.find() == []


def test_no_break_is_found_across_tenants() -> None:
    world = World()
    body = world.text(600)
    for number in range(6):
        world.end([*world.text(4), *body], tenant=f"tenant{number}")
    assert world.find() == []
    world.end([*world.text(4), *body], tenant="tenant0")
    assert [one.examples for one in world.find()] == [("r1", "r7")]


@pytest.mark.parametrize("num_head", [0, 100])
@pytest.mark.parametrize("num_kinds", [3, 7])
def test_prompts_of_several_kinds_in_turn_are_compared_with_their_own(num_head: int, num_kinds: int) -> None:
    world = World()
    head, bodies = world.text(num_head), [world.text(800) for _ in range(num_kinds)]
    for number in range(20 * num_kinds):
        world.end([*head, *world.text(5), *bodies[number % num_kinds], *world.text(30)], seconds=10.0)
    (found,) = world.find()
    assert found.position == num_head
    price = (num_head + 805) // TOKENS * TOKENS - -(-(num_head + 5) // TOKENS) * TOKENS
    assert found.num_tokens == pytest.approx(19 * num_kinds * price, rel=0.5)


@pytest.mark.parametrize("num_head", [0, 100])
def test_a_flood_of_several_kinds_in_turn_is_priced_by_whole_comparisons(num_head: int) -> None:
    world = World()
    head, bodies = world.text(num_head), [world.text(800) for _ in range(5)]
    for number in range(2000):
        world.end([*head, *world.text(5), *bodies[number % 5]], seconds=0.1)
    (found,) = world.find()
    assert found.is_estimated
    assert found.num_tokens == pytest.approx(2000 * 784, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_prompts_stand_for_all_until_one_is_sampled(seed: int) -> None:
    world = World(seed=seed)
    body = world.text(800)
    for number in range(40):
        world.end([*world.text(5), *body])
        if number > ALIGNED_PAIRS:
            assert world.find()[0].num_tokens == pytest.approx(number * 784, rel=0.15)


@pytest.mark.parametrize("num_head", [0, 100])
def test_the_first_prompts_of_each_kind_do_not_stand_for_all_others(num_head: int) -> None:
    prices = []
    for seed in range(10):
        world = World(seed=seed)
        head, bodies = world.text(num_head), [world.text(800) for _ in range(8)]
        for number in range(100):
            world.end([*head, *world.text(5), *bodies[number % 8]])
        (found,) = world.find()
        prices.append(found.num_tokens)
    assert sum(prices) / len(prices) == pytest.approx(92 * 784, rel=0.1)


@pytest.mark.parametrize("num_head", [0, 100])
def test_prompts_of_many_sessions_are_compared_with_their_own(num_head: int) -> None:
    world = World()
    head, system = world.text(num_head), world.text(300)
    chats, price = [Prompt() for _ in range(30)], 0
    for number in range(10 * len(chats)):
        chat = chats[number % len(chats)]
        # All but its last block: of a chat's first prompt, the rest of the system prompt.
        price += (num_head + 305 + len(chat)) // TOKENS * TOKENS - -(-(num_head + 5) // TOKENS) * TOKENS
        chat += world.text(100)
        session = f"chat{number % len(chats)}"
        world.end([*head, *world.text(5), *system, *chat], session=session, seconds=5.0)
    (found,) = world.find()
    assert found.num_tokens == pytest.approx(price, rel=0.15)


def test_of_several_breaks_the_one_that_explains_most_counts() -> None:
    world = World()
    head, tools = world.text(96), world.text(320)
    long, short = world.text(700), world.text(100)
    for turn in (long, short, long):
        world.end([*head, *world.text(16), *tools, *turn], seconds=10.0)
    (found,) = world.find()
    assert found.num_tokens == 320 + 1008


def test_equal_tokens_under_other_keys_are_a_break_without_text() -> None:
    world = World()
    prompt = world.text(400)
    for name in (b"one", b"other"):
        world.end(prompt, image=name)
    (found,) = world.find()
    assert (found.position, found.is_exact, found.token_ids) == (32, False, ((), ()))
    assert found.num_tokens == 400 // TOKENS * TOKENS - 32


def test_the_span_is_shown_from_both_sides_and_makes_the_position_exact() -> None:
    world = World()
    head, body = world.text(105), world.text(500)
    for span in ([1, 2, 3], [4, 5, 6, 7]):
        number = world.end([*head, *span, *body])
    (found,) = world.find()
    assert found.token_ids == ((1, 2, 3), (4, 5, 6, 7))
    assert found.ids_before == tuple(head[-16:])
    assert (found.examples, found.shared_tokens, found.num_spanned) == (("r1", "r2"), 96, (3, 4))
    story = world.partings.story(number)
    assert story is not None
    assert (story.outcome, story.position, story.exact) == (PrefixOutcome.PARTED, 105, True)


def test_position_of_a_story_is_that_at_which_it_left_the_request_it_names() -> None:
    world = World()
    head, body = world.text(100), world.text(300)
    for session, span in (("a", [1, 2, 3]), ("b", [1, 9, 9]), ("a", [1, 2, 8])):
        number = world.end([*head, *span, *body], session=session)
    story = world.partings.story(number)
    assert story is not None
    assert (story.earlier, story.position, story.exact) == ("r2", 101, True)


def test_tokens_that_were_served_cost_nothing() -> None:
    world = World()
    head, body = world.text(96), world.text(496)
    world.end([*head, *world.text(16), *body])
    world.end([*head, *world.text(16), *body], served=304)
    assert [one.num_tokens for one in world.find()] == [608 - 304]


def test_tokens_of_prompts_below_a_block_count_as_computed() -> None:
    world = World()
    world.end(world.text(10))
    assert world.partings.breaks.find(world.now_s, 3600.0) == (10, [])


def test_a_flood_at_one_place_is_sampled_and_its_price_scaled() -> None:
    world = World()
    head, body = world.text(96), world.text(512)
    world.end([*head, *world.text(16), *body])
    for _ in range(400):
        world.end([*head, *world.text(16), *body], seconds=0.02)
    (found,) = world.find()
    assert found.is_estimated
    assert found.num_tokens == pytest.approx(400 * 512, rel=0.02)
    assert found.num_requests == pytest.approx(400, rel=0.02)
    # A branch at the same place costs nothing, whether it is compared or not.
    assert breaks.ALIGNED_AT_ONCE + 400 * 0.02 * breaks.ALIGNED_PER_S < 50


def test_a_prompt_whose_partners_were_forgotten_makes_the_price_an_estimate() -> None:
    world = World(100_000)
    head, body = world.text(96), world.text(512)
    for number in range(3):
        if number == 2:
            for _ in range(20):
                world.end(world.text(1000), tenant="other", seconds=20.0)
        world.end([*head, *world.text(16), *body])
    (found,) = world.find()
    assert (found.is_estimated, found.num_requests, found.num_tokens) == (True, 2, 2 * 512)


def test_places_where_chats_branch_displace_no_break() -> None:
    world = World()
    clock(world)
    head = world.text(64)
    for _ in range(breaks.MAX_PLACES + 50):
        world.end(head)
        world.end([*head, *world.text(64)])
        world.end(head := [*head[:32], *world.text(32)])
    assert len(world.find()) == 1
    for _ in range(breaks.MAX_PLACES + 20):
        clock(world)
    assert len(world.find()) == breaks.MAX_PLACES
    assert len(world.partings.breaks._places) <= breaks.MAX_PLACES


def test_breaks_outside_the_window_are_left_out() -> None:
    world = World()
    clock(world)
    world.now_s += 1800
    other = world.text(64)
    world.end(other)
    assert len(world.find()) == 1
    assert world.find(window_s=600.0) == []
    world.now_s += 1801
    world.end([*other, *world.text(80)])
    assert world.find() == []


@pytest.mark.parametrize("event", [ResetEvent(1.0, 1, 0), KeepTokenIds(0)])
def test_a_reset_or_the_setting_at_zero_forgets_ids_and_breaks(event: ResetEvent | KeepTokenIds) -> None:
    world = World()
    clock(world)
    assert world.partings.breaks.num_bytes > 0
    world.partings.read([event])
    assert (world.partings.breaks.num_bytes, world.find()) == (0, [])
    left = vars(world.partings.breaks)
    assert not any(left[name] for name in ("_places", "_broken"))
    assert not any(left[name].prompts or left[name].latest for name in ("_kept", "_older"))


@pytest.mark.parametrize("max_bytes", [1, 1000, 50_000, 400_000])
def test_memory_stays_within_the_setting(max_bytes: int) -> None:
    world = World(max_bytes)
    for number in range(60):
        clock(world) if number % 3 else other_prompts(world)
        assert world.partings.breaks.num_bytes <= max_bytes


def test_what_places_take_is_counted_and_leaves_room_for_ids() -> None:
    world = World(max_bytes := 200_000)
    tracemalloc.start()
    for _ in range(300):
        head, body = world.text(64), world.text(100)
        for _ in range(2):
            world.end([*head, *world.text(80), *body])
    taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, breaks.__file__)])
    tracemalloc.stop()
    assert sum(one.size for one in taken.traces) <= max_bytes
    assert ("r599", "r600") in {one.examples for one in world.find()}


def test_only_the_search_for_an_equal_run_is_of_limited_length() -> None:
    rng = random.Random(1)
    one = [rng.randrange(1000) for _ in range(2 * breaks.MAX_SIDE_TOKENS)]
    some, others = np.array(one, dtype=np.uint32), np.array([5, 5, *one], dtype=np.uint32)
    span = compare(some, others)
    assert span is not None
    assert (span.start, span.earlier_end, span.later_end) == (0, 0, 2)
    assert span.num_equal == 2 * breaks.MAX_SIDE_TOKENS
    span = compare(some, np.concatenate([others[: breaks.MAX_SIDE_TOKENS - 5], others[:2], some[::-1]]))
    assert span is not None
    assert not span.is_break, "what follows is not equal, also beyond that length"


@pytest.mark.parametrize("max_bytes", [64 << 20, *range(30_000, 80_000, 5_000)])
def test_a_break_is_found_in_ids_that_several_turns_have(max_bytes: int) -> None:
    world = World(max_bytes)
    head, prompt = world.text(40), Prompt()
    for _ in range(8):
        prompt = [*prompt, *world.text(60)]
        answer = world.text(30)
        last = world.end([*head, *prompt], answer)
        prompt += answer
    world.end([*head, *world.text(7), *prompt])
    (found,) = world.find()
    assert (found.position, found.shared_tokens, found.examples[0]) == (40, 32, f"r{last}")
    assert len(prompt) - 2 * TOKENS <= found.num_tokens <= len(prompt)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25),
    st.sampled_from([4000, 10_000, 64 << 20]),
    st.sampled_from([2, 4, TABLE_BITS]),
)
@example([[0, 2, 2, 2], [0], [0, 2, 2, 2]], 10_000, 3)  # The second one takes a place of the first one's keys.
def test_kept_ids_are_those_of_their_requests(prompts: list[list[int]], max_bytes: int, table_bits: int) -> None:
    world, ended = World(max_bytes, table_bits), dict[int, Prompt]()
    for slots in prompts:
        ids = [*chain.from_iterable([slot] * TOKENS for slot in slots), 9]
        ended[world.end(ids, [8] * len(slots))] = [*ids, *[8] * len(slots)]
        for kept in (world.partings.breaks._kept, world.partings.breaks._older):
            for number, prompt in kept.prompts.items():
                for first in range(0, len(ended[number]), TOKENS):
                    assert prompt.tokens(first).tolist() == ended[number][first:]
        assert world.partings.breaks.num_bytes <= max_bytes


def test_memory_that_fills_keeps_the_latest_prompts() -> None:
    world = World(400_000)
    for number in range(1, 61):
        clock(world)
        assert sum(one.num_requests for one in world.find()) == 3 * number


@pytest.mark.parametrize("seconds", [0.5, 0.05])
def test_breaks_amid_other_traffic_are_found_and_priced(seconds: float) -> None:
    world = World()
    heads = [world.text(length) for length in (0, 40, 150, 600)]
    bodies = [world.text(800) for _ in heads]
    for _ in range(5):
        for head, body in zip(heads, bodies, strict=True):
            world.end([*head, *world.text(5), *body, *world.text(30)], seconds=seconds)
            for _ in range(10):
                world.end([*head, *world.text(200)], seconds=seconds)
    found = {one.position: (one.num_requests, one.num_tokens, one.is_estimated) for one in world.find()}
    prices = {len(head): (len(head) + 805) // TOKENS - -(-(len(head) + 5) // TOKENS) for head in heads}
    assert found == {position: (4, 4 * TOKENS * price, False) for position, price in prices.items()}


def test_a_session_that_breaks_for_the_first_time_is_compared_with_its_own() -> None:
    world = World()
    head, system = world.text(40), world.text(300)
    chats = [world.text(100) for _ in range(4)]
    for _ in range(2):
        for number, chat in enumerate(chats):
            chat_id = world.text(3)
            for _ in range(3):
                world.end([*head, *chat_id, *system, *chat], session=f"chat{number}", seconds=10.0)
                chat += world.text(200)
        for _ in range(10):
            world.end([*head, *world.text(200)], seconds=10.0)
    (found,) = world.find()
    assert found.position == 40
    # At first the system prompt is equal again, then the chat of four turns too.
    price = 3 * (336 - 48) + 4 * (843 // TOKENS * TOKENS - 48)
    assert found.num_tokens == price
