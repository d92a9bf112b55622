"""The workload of `kvferry demo`: deterministic by seed, with prompts that grow and share their beginnings."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.app.replay.workload import Conversation, Transcript, plan_workload

plans = st.builds(
    plan_workload,
    seed=st.integers(),
    conversations=st.integers(1, 8),
    turns=st.integers(1, 4),
    scale=st.floats(0.01, 1.0),
    think_s=st.floats(0, 10),
)


def prompts(conversation: Conversation, label: str, answer: str = "yes", chars_per_token: float = 1.0) -> list[str]:
    """The prompt of each turn, where the engine always gives the same answer."""
    transcript = Transcript(conversation, 1, label, chars_per_token)
    sent = []
    for turn in range(len(conversation.turns)):
        transcript.add_message(turn)
        sent.append(transcript.prompt)
        transcript.add_answer(answer)
    return sent


@given(plans, st.text(max_size=30))
def test_prompts_of_a_conversation_begin_with_what_came_before(plan: tuple[Conversation, ...], answer: str) -> None:
    for conversation in plan:
        sent = prompts(conversation, "a", answer)
        for before, after in pairwise(sent):
            assert after.startswith(before + answer)
            assert len(after) > len(before + answer)


@given(plans)
def test_prompts_when_the_label_differs_have_one_shape_and_share_no_words(plan: tuple[Conversation, ...]) -> None:
    for conversation in plan:
        one, other = (prompts(conversation, label) for label in ("a", "b"))
        assert [len(prompt) for prompt in one] == [len(prompt) for prompt in other]
        # The first 16 characters are at most a block, even where a token is a character.
        assert {prompt[:16] for prompt in one}.isdisjoint(prompt[:16] for prompt in other)


@given(plans)
def test_prompts_when_answers_are_noise_stay_within_the_bound(plan: tuple[Conversation, ...]) -> None:
    for conversation in plan:
        transcript = Transcript(conversation, 1, "a", 1.0)
        for number, turn in enumerate(conversation.turns):
            transcript.add_message(number)
            length = len(transcript.prompt.encode()) + turn.output_tokens
            transcript.add_answer("\N{REPLACEMENT CHARACTER}" * turn.output_tokens)
        assert length <= conversation.max_tokens
