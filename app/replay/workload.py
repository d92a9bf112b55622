"""Seeded multi-turn workload: conversations and agents behind shared system prompts, with think times.

The shape (lengths and times) depends on the seed alone; the words also on a label, so that two passes with different
labels send prompts of the same shape that share nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

AGENT_SHARE = 3
"""One of this many conversations is an agent."""
CHAT_SYSTEM_TOKENS = 300
AGENT_SYSTEM_TOKENS = 1200
"""An agent's system prompt describes its tools."""
CHAT_LENGTHS = ((800, 1600), (50, 150))
"""Bounds of the first message of a person, which brings a document, and of later ones; in tokens."""
AGENT_LENGTHS = ((200, 400), (100, 400))
"""Bounds of an agent's task, and of its tools' results."""
OUTPUT_TOKENS = (8, 24)
START_SPREAD = 3.0
"""Time in which all conversations begin, relative to the mean think time."""
MAX_CHAR_BYTES = 4
"""Bytes of a character. Noise of a model whose tokens are bytes becomes characters of three."""
TURN_EXTRA_TOKENS = 24
"""Bound of the names of roles that a turn adds to a prompt."""
TOOL_SHARE_OF_THINKING = 0.25
"""Time of a tool, relative to that of a person."""
MAX_THINKING = 3.0
"""Longest think time, relative to the mean."""
_VOCABULARY = (
    "account answer archive balance before branch budget carry change check client column common copy daily detail "
    "device early engine every figure first follow general handle host index invoice item layer letter limit long "
    "market measure memory message middle model month never note number offer often order other page part place point "
    "policy price prompt query quiet range reason record region report result return review route sample second state "
    "section server short simple source step store summary system table target ticket token total under value year"
)
_WORDS = tuple(_VOCABULARY.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: a message of a user or a tool, and the answer's length; lengths in tokens."""

    think_s: float
    message_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of a person or an agent with the engine. Conversations of a kind share a system prompt."""

    name: str
    is_agent: bool
    system_tokens: int
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """Return the planned length of the last prompt with its answer."""
        return self.system_tokens + sum(turn.message_tokens + turn.output_tokens for turn in self.turns)

    @property
    def max_tokens(self) -> int:
        """Return the bound of that length with the names of roles, where a token is a byte of text."""
        added = sum((MAX_CHAR_BYTES - 1) * turn.output_tokens + TURN_EXTRA_TOKENS for turn in self.turns)
        return self.num_tokens + TURN_EXTRA_TOKENS + added


def plan_workload(seed: int, conversations: int, turns: int, scale: float, think_s: float) -> tuple[Conversation, ...]:
    """Return the conversations of a seed.

    Args:
        seed: Equal seeds give equal workloads.
        conversations: Their number.
        turns: Requests of each conversation.
        scale: Factor on all lengths of prompts.
        think_s: Mean time before a person's message; tools take a part of it.
    """
    rng = random.Random(f"kvferry demo {seed}")
    plan = []
    for number in range(conversations):
        is_agent = number % AGENT_SHARE == AGENT_SHARE - 1
        start_tokens, next_tokens = AGENT_LENGTHS if is_agent else CHAT_LENGTHS
        mean_s = think_s * (TOOL_SHARE_OF_THINKING if is_agent else 1.0)
        plan.append(
            Conversation(
                name=f"{'agent' if is_agent else 'chat'}-{number + 1}",
                is_agent=is_agent,
                system_tokens=_scaled(AGENT_SYSTEM_TOKENS if is_agent else CHAT_SYSTEM_TOKENS, scale),
                turns=tuple(
                    Turn(
                        _thinking(rng, mean_s) if turn else rng.uniform(0, START_SPREAD * think_s),
                        _scaled(rng.randint(*(next_tokens if turn else start_tokens)), scale),
                        rng.randint(*OUTPUT_TOKENS),
                    )
                    for turn in range(turns)
                ),
            )
        )
    return tuple(plan)


class Transcript:
    """The prompt of one conversation so far, with words made from seed and label. It only grows."""

    def __init__(self, conversation: Conversation, seed: int, label: str, chars_per_token: float) -> None:
        self._conversation = conversation
        self._seed_text = f"{seed}/{label}"
        self._chars_per_token = chars_per_token
        kind = "agent with tools" if conversation.is_agent else "assistant"
        self.prompt = f"system: {self._words(kind, conversation.system_tokens, f'You are an {kind}.')}\n"

    def add_message(self, turn: int) -> None:
        """Append the message of a user, or the result of an agent's tool, for this turn."""
        start = "Result of the tool:" if self._conversation.is_agent and turn else "Question:"
        name = f"{self._conversation.name}/{turn}"
        content = self._words(name, self._conversation.turns[turn].message_tokens, start)
        self.prompt += f"user: {content}\nassistant: "

    def add_answer(self, text: str) -> None:
        """Append the engine's answer."""
        self.prompt += f"{text}\n"

    def _words(self, name: str, tokens: int, start: str) -> str:
        return make_text(f"{self._seed_text}/{name}", round(tokens * self._chars_per_token), start)


def make_text(seed_text: str, num_chars: int, start: str) -> str:
    """Return words of this length, at least a character. Texts of different seeds differ from their first word."""
    rng = random.Random(seed_text)
    parts = [f"{rng.getrandbits(32):08x}", start]
    length = sum(map(len, parts)) + 1
    while length < num_chars:
        parts.append(rng.choice(_WORDS))
        length += len(parts[-1]) + 1
    return " ".join(parts)[: max(1, num_chars)]


def _thinking(rng: random.Random, mean_s: float) -> float:
    return min(rng.expovariate(1.0), MAX_THINKING) * mean_s


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
