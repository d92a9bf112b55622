"""Text of prompts and answers: tokenizers, detokenizing token by token, and stop strings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

log = logging.getLogger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 64
"""Tokens without a whole character after which their text is sent as it is: valid text has a few at most."""
TINY_FOLDER = Path(__file__).with_name("tiny")
"""Tokenizer of `tiny`: 0 pad, 1 end, 2 unknown, byte b is b + 3."""

Messages = Sequence[Mapping[str, str]]
"""A chat as its template reads it: `role`, `content`, and for some `name`."""


class CheckpointTokenizer:
    """Tokenizer saved with a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Initializes lazy state before threads share it, and detects the empty tokenizer made up for a folder without
        # one.
        if not self.encode("A probe."):
            raise ValueError("its vocabulary is empty")
        special = set(tokenizer.all_special_tokens)
        self.max_token_chars = max(len(token) for token in tokenizer.get_vocab() if token not in special)

    def encode(self, text: str) -> list[int]:
        """Return ids with the special tokens that the model expects at the start."""
        return [int(i) for i in self._tokenizer.encode(text)]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the ids of the prompt that the chat template makes, with the special tokens that it writes."""
        if self._tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: send a prompt to /v1/completions")
        try:
            prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is the checkpoint's own program
            raise ValueError(f"the model's chat template fails: {first_line(error)}") from error
        return [int(i) for i in self._tokenizer.encode(prompt, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class NoTokenizer:
    """For a folder without a tokenizer: prompts and answers are token ids."""

    max_token_chars = sys.maxsize

    def encode(self, text: str) -> list[int]:
        """Raise `ValueError`: text is not supported."""
        raise ValueError("this model has no tokenizer: send the prompt as token ids")

    def encode_chat(self, messages: Messages) -> list[int]:
        """Raise `ValueError`: text is not supported."""
        raise ValueError("this model has no tokenizer, and so no chat template: send token ids to /v1/completions")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return an empty text."""
        return ""


Tokenizer = CheckpointTokenizer | NoTokenizer
"""Conversion between text and ids. `encode` and `encode_chat` raise `ValueError` for text that they cannot convert.

`max_token_chars` is the most characters of one token.
"""


class Detokenizer:
    """Text of an answer, piece by piece.

    Tokens are decoded together with those of the piece before, because spaces and joined characters depend on them.
    Text that ends within a character is held back until the next tokens complete the character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        """Tokens of the last piece."""
        self._new: list[int] = []
        """Tokens since the last piece."""
        self._num_context_chars = 0
        """Characters of the context's text."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often empty."""
        self._new.append(token_id)
        piece = self.flush()
        if (not piece or piece.endswith(REPLACEMENT)) and len(self._new) < MAX_HELD_TOKENS:
            return ""
        self._context, self._new = self._new, []
        self._num_context_chars = len(self._tokenizer.decode(self._context))
        return piece

    def flush(self) -> str:
        """Return the held text, once no token follows."""
        return self._tokenizer.decode(self._context + self._new)[self._num_context_chars :]


class StopScanner:
    """Text of an answer up to its first stop string.

    The last characters are held back, one fewer than the longest stop string has: a stop string may begin there.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._max_held = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text that may be sent now, and whether a stop string ended the answer, if it `may_stop`."""
        return self._scan(self._detokenizer.push(token_id), may_stop)

    def flush(self) -> str:
        """Return the held text, once no token follows."""
        piece, is_stopped = self._scan(self._detokenizer.flush(), True)
        return piece if is_stopped else piece + self._held

    def _scan(self, piece: str, may_stop: bool) -> tuple[str, bool]:
        text = self._held + piece
        # Only those that end in the new piece: earlier ones did not stop the answer.
        places = [text.find(stop, max(len(self._held) - len(stop) + 1, 0)) for stop in self._stops]
        starts = [start for start in places if start >= 0]
        if starts and may_stop:
            return text[: min(starts)], True
        num_sent = max(len(text) - self._max_held, 0)
        self._held = text[num_sent:]
        return text[:num_sent], False


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of a local folder or hub id; without one, log it and serve token ids only."""
    try:
        return CheckpointTokenizer(AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        log.warning("KVFERRY_MODEL=%s: no usable tokenizer (%s); prompts must be token ids", model, first_line(error))
        return NoTokenizer()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]
