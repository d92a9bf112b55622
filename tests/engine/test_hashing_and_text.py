"""Block hashes are the same everywhere and differ for whatever changes KV; pieces of text make the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from transformers import AutoTokenizer

from kvferry.app.engines.embedded.block_pool import HASH_BYTES, chain_root, extend_chain
from kvferry.app.engines.embedded.tokenizer import (
    BYTE_VOCAB_SIZE,
    EOS_ID,
    TINY_FOLDER,
    ByteTokenizer,
    CheckpointTokenizer,
    ContextStream,
    NoTokenizer,
    StopScanner,
    Tokenizer,
)
from tests.harness.checkpoints import byte_tokenizer
from tests.harness.effort import num_lines_run


def chain(tokens: list[int], block_size: int = 4, salt: str | None = None, lora: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, chain_root(salt, lora), tokens, block_size)
    return hashes


def test_hashes_are_the_same_in_every_process() -> None:
    """LMCache#1788: hashes differed from process to process."""
    assert [h.hex()[:16] for h in chain(list(range(3, 12)))] == KNOWN_HASHES
    assert all(len(h) == HASH_BYTES for h in chain(list(range(8))))


KNOWN_HASHES = ["780f3fdc4a32d31c", "22a3849a54222ff8"]


@given(tokens=st.lists(st.integers(0, 2**31), max_size=40), cut=st.integers(0, 40), block_size=st.integers(1, 9))
def test_a_chain_grown_by_pieces_is_the_chain_of_the_whole(tokens: list[int], cut: int, block_size: int) -> None:
    hashes: list[bytes] = []
    root = chain_root(None, None)
    extend_chain(hashes, root, tokens[:cut], block_size)
    extend_chain(hashes, root, tokens, block_size)
    assert hashes == chain(tokens, block_size)


def test_every_difference_shows_from_its_block_on() -> None:
    """LMCache#4492, vllm#49261, vllm#42125."""
    tokens = list(range(20))
    base = chain(tokens)
    changed = chain([*tokens[:9], 99, *tokens[10:]])
    assert [a == b for a, b in zip(base, changed, strict=True)] == [True, True, False, False, False]
    roots = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "a"), ("ab", None), ("a", "b")]
    assert len({chain(tokens, 4, salt, lora)[0] for salt, lora in roots}) == len(roots)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push(i) for i in ids] + [stream.flush()])


@given(ids=st.lists(st.integers(0, BYTE_VOCAB_SIZE - 1), max_size=30))
def test_bytes_in_pieces_make_the_text_of_the_whole(ids: list[int]) -> None:
    assert pieces(ByteTokenizer(), ids) == ByteTokenizer().decode(ids)


@given(text=st.text(max_size=20))
def test_text_encoded_and_decoded_is_unchanged(text: str) -> None:
    for tokenizer in (ByteTokenizer(), CheckpointTokenizer(byte_tokenizer())):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert pieces(tokenizer, ids) == text


class ChunkTokenizer(ByteTokenizer):
    """Its tokens are pieces of a text's bytes, as those of a byte-level BPE, and end within characters."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.chunks[i] for i in token_ids).decode(errors="replace")


@given(
    text=st.text(max_size=20) | st.text("\u30fc\U0001f600", min_size=5), sizes=st.lists(st.integers(1, 5), min_size=4)
)
@example(text="\u30fc" * 20, sizes=[1, *[3] * 20])
@example(text="\U0001f600" * 9, sizes=[1, 2, 2, 2, 1])
def test_text_when_tokens_cross_characters_is_unchanged(text: str, sizes: list[int]) -> None:
    data, chunks = text.encode(), []
    for size in itertools.cycle(sizes):
        chunks.append(data[:size])
        data = data[size:]
        if not data:
            break
    stream = ContextStream(ChunkTokenizer(chunks))
    assert "".join([stream.push(i) for i in range(len(chunks))] + [stream.flush()]) == text


@given(text=st.text(max_size=20) | st.sampled_from(["<eos>", "a<pad>b", " x", "\u0000"]))
def test_tiny_when_loaded_from_its_folder_has_the_same_ids(text: str) -> None:
    folder = AutoTokenizer.from_pretrained(TINY_FOLDER)
    assert folder.encode(text) == ByteTokenizer().encode(text)
    assert folder.decode(folder.encode(text)) == text
    messages = [{"role": "user", "content": text}]
    prompt = f"<|user|>\n{text}\n<|assistant|>\n"
    assert ByteTokenizer().encode_chat(messages) == ByteTokenizer().encode(prompt)


def test_chat_template_of_a_checkpoint_makes_the_prompt() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="no chat template: send a prompt to /v1/completions"):
        CheckpointTokenizer(tokenizer).encode_chat(messages)
    tokenizer.chat_template = "<s>{{ messages[0].content }}{% if add_generation_prompt %}</s>{% endif %}"
    plain = CheckpointTokenizer(tokenizer).encode("Hi")
    assert CheckpointTokenizer(tokenizer).encode_chat(messages) == [1, *plain[-2:], 2]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="chat template fails: roles must alternate"):
        CheckpointTokenizer(tokenizer).encode_chat(messages)


def test_stop_string_when_before_min_tokens_does_not_count() -> None:
    scanner = StopScanner(ByteTokenizer().stream(), ["ab"])
    told = [scanner.push(token, number > 2) for number, token in enumerate(ByteTokenizer().encode("abab"))]
    assert told == [("", False), ("ab", False), ("", False), ("", True)]


def test_no_piece_shows_half_a_character() -> None:
    for tokenizer in (ByteTokenizer(), CheckpointTokenizer(byte_tokenizer())):
        stream = tokenizer.stream()
        assert [stream.push(i) for i in tokenizer.encode("a\u20acb")] == ["a", "", "", "\u20ac", "b"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    with pytest.raises(ValueError, match="token ids"):
        NoTokenizer().encode("x")
    assert pieces(NoTokenizer(), [5, 6]) == ""


def until_stop(text: str, stops: list[str]) -> str:
    scanner, told = StopScanner(ByteTokenizer().stream(), stops), ""
    for token in ByteTokenizer().encode(text):
        piece, stopped = scanner.push(token)
        told += piece
        assert not any(stop in told for stop in stops)
        if stopped:
            return told
    return told + scanner.flush()


@given(text=st.text("ab", max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        first = min(ends)
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        assert until_stop(text, stops) == text[: first - longest]
    else:
        assert until_stop(text, stops) == text


@pytest.mark.parametrize("others", [(), ("ac", "ad")], ids=["alone", "others start at each held character"])
def test_stop_matching_when_stop_strings_grow_costs_the_same(others: tuple[str, ...]) -> None:
    def cost(stop_chars: int) -> int:
        scanner = StopScanner(
            ByteTokenizer().stream(), ["a" * stop_chars + "b", *(one * (stop_chars // 2) for one in others)]
        )
        ids = ByteTokenizer().encode("a" * (stop_chars // 2))
        for token_id in ids:
            scanner.push(token_id)
        return num_lines_run(lambda: [scanner.push(token_id) for token_id in ids[:10]])

    assert cost(4000) == cost(40)


class CountingTokenizer(ByteTokenizer):
    """Counts the token ids that it decodes; special tokens decode to nothing."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


def test_detokenizing_when_tokens_have_no_text_is_linear() -> None:
    def cost(num_tokens: int) -> int:
        tokenizer = CountingTokenizer()
        stream = ContextStream(tokenizer)
        for token_id in [5, *[EOS_ID] * num_tokens]:
            assert stream.push(token_id) in ("", "\x02")
        assert stream.push(70) == "C"
        return tokenizer.num_decoded

    assert cost(4000) < 12 * cost(400)
