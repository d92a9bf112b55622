"""Text of prompts and answers: tokenizers, streams of text from the tokens of an answer, and stop strings.

The built-in model has one token per byte, every other model its checkpoint's own tokenizer.
"""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

log = logging.getLogger(__name__)

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
BYTE_OFFSET = 3
BYTE_VOCAB_SIZE = 256 + BYTE_OFFSET
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_TOKENS_A_CHARACTER = 4
TINY_FOLDER = Path(__file__).with_name("tiny")
"""Tokenizer of `tiny` in the format of checkpoints, with its chat template: for benchmarks, which need a folder."""

Messages = Sequence[Mapping[str, str]]
"""A chat as its template reads it: `role`, `content`, and for some `name`."""


@cache
def _tiny_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_FOLDER)


def _render(tokenizer: Any, messages: Messages) -> str:
    """Return the prompt that a chat template makes. Raises `ValueError`, for a template that refuses the messages."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is the checkpoint's own program
        raise ValueError(f"the model's chat template fails: {first_line(error)}") from error


class ByteTokenizer:
    """ByT5's ids: 0 pad, 1 end, 2 unknown, byte b is b + 3."""

    max_token_chars = 1

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes as ids, without an end token."""
        return [byte + BYTE_OFFSET for byte in text.encode()]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the bytes of the prompt that the chat template makes."""
        return self.encode(_render(_tiny_tokenizer(), messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the bytes; invalid UTF-8 becomes U+FFFD, special tokens are dropped."""
        return bytes(i - BYTE_OFFSET for i in token_ids if i >= BYTE_OFFSET).decode(errors="replace")

    def stream(self) -> ByteStream:
        """Return a detokenizer that holds incomplete characters back."""
        return ByteStream()


class ByteStream:
    """Detokenizer of bytes: the pieces put together are the text of the whole answer."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often empty."""
        return self._decoder.decode(bytes([token_id - BYTE_OFFSET])) if token_id >= BYTE_OFFSET else ""

    def flush(self) -> str:
        """Return the held text, once no token follows."""
        return self._decoder.decode(b"", final=True)


class CheckpointTokenizer:
    """Tokenizer saved with a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Initializes lazy state before threads share it, and detects the empty tokenizer made up for a folder without
        # one.
        if not self.encode("A probe."):
            raise ValueError("its vocabulary is empty")
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Return ids with the special tokens that the model expects at the start."""
        return [int(i) for i in self._tokenizer.encode(text)]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the ids of the prompt that the chat template makes, with the special tokens that it writes."""
        if self._tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: send a prompt to /v1/completions")
        return [int(i) for i in self._tokenizer.encode(_render(self._tokenizer, messages), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self) -> ContextStream:
        """Return a detokenizer that decodes with the preceding piece as context."""
        return ContextStream(self)


class ContextStream:
    """Decodes each piece together with the one before it, because spaces and joined characters depend on context.

    Text that ends in an incomplete character is held back, up to the most tokens of one character; then all but that
    character is sent. As many tokens without text are dropped, so that a push costs the same whatever the answer has.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The last tokens: context, then those since the last piece."""
        self._num_new = 0
        self._num_held = 0
        """Tokens since text has been held back."""
        self._num_sent = 0
        """Characters of the window's text that were sent."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often empty."""
        self._window.append(token_id)
        self._num_new += 1
        text = self._tokenizer.decode(self._window)
        if len(text) > self._num_sent:
            self._num_held += 1
            if self._num_held >= MAX_TOKENS_A_CHARACTER or not text.endswith(REPLACEMENT):
                return self._emit(text)
        elif self._num_new >= MAX_TOKENS_A_CHARACTER:
            del self._window[-self._num_new :]
            self._num_new = 0
        return ""

    def flush(self) -> str:
        """Return the held text, once no token follows."""
        piece = self._tokenizer.decode(self._window)[self._num_sent :]
        self._window, self._num_new, self._num_held, self._num_sent = [], 0, 0, 0
        return piece

    def _emit(self, text: str) -> str:
        """Return the text up to an incomplete character, and keep as many tokens as the next pieces depend on."""
        num_sent = self._num_sent
        complete = text.rstrip(REPLACEMENT)
        if complete == text:
            # The next piece follows a character, of which these tokens are the end.
            self._window = self._window[-self._num_new :]
            self._num_sent = len(self._tokenizer.decode(self._window))
        elif len(complete) > num_sent:
            # The last character that is complete may have begun as many tokens earlier.
            self._window = self._window[-2 * MAX_TOKENS_A_CHARACTER :]
            self._num_sent = len(self._tokenizer.decode(self._window).rstrip(REPLACEMENT))
        else:
            # No valid text has so many tokens without a character. The last one may be the beginning of one.
            complete = text[:-1] if len(text) > num_sent + 1 else text
            self._window = self._window[-self._num_new :]
            self._num_sent = len(self._tokenizer.decode(self._window)) - (len(text) - len(complete))
        self._num_new = self._num_held = 0
        return complete[num_sent:]


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

    def stream(self) -> ContextStream:
        """Return a detokenizer that yields no text."""
        return ContextStream(self)


TextStream = ByteStream | ContextStream
Tokenizer = ByteTokenizer | CheckpointTokenizer | NoTokenizer
"""Conversion between text and ids. `encode` and `encode_chat` raise `ValueError` for text that they cannot convert.

`max_token_chars` is the most characters of one token.
"""


class StopScanner:
    """Text of an answer up to its first stop string. A possible start of a stop string is held back until it is
    decided; the held text is shorter than the longest stop string.

    Each stop string is compared at most once from each place of the text, whatever the others hold back.
    """

    def __init__(self, text: TextStream, stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._held = ""
        self._starts = [0] * len(stops)
        """Where in the held text each stop string may start at the earliest."""

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text that may be sent now, and whether a stop string ended the answer, which it `may_stop`."""
        return self._scan(self._text.push(token_id), may_stop)

    def flush(self) -> str:
        """Return the held text, once no token follows."""
        piece, stopped = self._scan(self._text.flush())
        rest, self._held = ("" if stopped else self._held), ""
        return piece + rest

    def _scan(self, piece: str, may_stop: bool = True) -> tuple[str, bool]:
        text = self._held + piece
        stops = list(zip(self._stops, self._starts, strict=True))
        stops_at = [start for stop, first in stops if (start := text.find(stop, first)) >= 0]
        if stops_at and may_stop:
            self._held = ""
            return text[: min(stops_at)], True
        starts = [_possible_start(text, stop, first) for stop, first in stops]
        num_sent = min(starts, default=len(text))
        self._held, self._starts = text[num_sent:], [start - num_sent for start in starts]
        return text[:num_sent], False


def _possible_start(text: str, stop: str, first: int) -> int:
    """Return where the longest end of `text[first:]` with which `stop` begins starts, `len(text)` if there is none."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, first))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) if start < 0 else start


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
