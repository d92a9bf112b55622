"""Block hashes are the same everywhere and differ for whatever changes KV; pieces of text make the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from kvferry.app.engines.embedded.block_pool import HASH_BYTES, chain_root, extend_chain
from kvferry.app.engines.embedded.model import TINY_VOCAB_SIZE
from kvferry.app.engines.embedded.tokenizer import (
    TINY_FOLDER,
    CheckpointTokenizer,
    Detokenizer,
    NoTokenizer,
    StopScanner,
    Tokenizer,
    load_tokenizer,
)
from tests.harness.checkpoints import byte_tokenizer


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


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(str(TINY_FOLDER))


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join([stream.push(i) for i in ids] + [stream.flush()])


@given(ids=st.lists(st.integers(0, TINY_VOCAB_SIZE - 1), max_size=30))
def test_tokens_in_pieces_make_the_text_of_the_whole(tiny: Tokenizer, ids: list[int]) -> None:
    text = bytes(i - 3 for i in ids if i >= 3).decode(errors="replace")
    assert pieces(tiny, ids) == tiny.decode(ids) == text


@given(text=st.text(max_size=20) | st.sampled_from(["<eos>", "a<pad>b", " x", "\u0000"]))
def test_text_encoded_and_decoded_is_unchanged(tiny: Tokenizer, text: str) -> None:
    assert tiny.encode(text) == [byte + 3 for byte in text.encode()]
    assert tiny.encode_chat([{"role": "user", "content": text}]) == tiny.encode(f"<|user|>\n{text}\n<|assistant|>\n")
    for tokenizer in (tiny, CheckpointTokenizer(byte_tokenizer())):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == pieces(tokenizer, ids) == text


class ChunkTokenizer(NoTokenizer):
    """Its tokens are pieces of a text's bytes, as those of a byte-level BPE, and end within characters."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.chunks[i] for i in token_ids).decode(errors="replace")


@given(
    text=st.text(max_size=20) | st.text("\u30fc\U0001f600", min_size=5, max_size=20),
    sizes=st.lists(st.integers(1, 5), min_size=4),
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
    assert pieces(ChunkTokenizer(chunks), list(range(len(chunks)))) == text


WORDS = ["\u2581Hello", "\u2581", "ing", "\u2581\u2581", "\n", "\u2581\u65e5"]


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: a leading space is dropped, and bytes that are no character together are one U+FFFD each."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@given(parts=st.lists(st.sampled_from([*WORDS, "</s>", "\u20ac", "\U0001f600"]), max_size=30))
def test_text_when_characters_are_bytes_between_words_is_unchanged(parts: list[str]) -> None:
    hf = fallback_tokenizer()
    ids: list[int] = []
    for part in parts:
        number = hf.get_vocab().get(part)
        ids += [3 + byte for byte in part.encode()] if number is None else [number]
    tokenizer = CheckpointTokenizer(hf)
    assert pieces(tokenizer, ids) == tokenizer.decode(ids)


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


def test_stop_string_when_before_min_tokens_does_not_count(tiny: Tokenizer) -> None:
    scanner = StopScanner(Detokenizer(tiny), ["ab"])
    pieces = [scanner.push(token, number > 2) for number, token in enumerate(tiny.encode("abab"))]
    assert pieces == [("", False), ("a", False), ("b", False), ("", True)]


def test_no_piece_shows_half_a_character(tiny: Tokenizer) -> None:
    for tokenizer in (tiny, CheckpointTokenizer(byte_tokenizer())):
        stream = Detokenizer(tokenizer)
        assert [stream.push(i) for i in tokenizer.encode("a\u20acb")] == ["a", "", "", "\u20ac", "b"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    with pytest.raises(ValueError, match="token ids"):
        NoTokenizer().encode("x")
    assert pieces(NoTokenizer(), [5, 6]) == ""


def until_stop(tokenizer: Tokenizer, text: str, stops: list[str]) -> str:
    scanner, sent = StopScanner(Detokenizer(tokenizer), stops), ""
    for token in tokenizer.encode(text):
        piece, stopped = scanner.push(token)
        sent += piece
        assert not any(stop in sent for stop in stops)
        if stopped:
            return sent
    return sent + scanner.flush()


@given(text=st.text("ab", max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_its_first_stop_string(tiny: Tokenizer, text: str, stops: list[str]) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        first = min(ends)
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        assert until_stop(tiny, text, stops) == text[: first - longest]
    else:
        assert until_stop(tiny, text, stops) == text


class CountingTokenizer(NoTokenizer):
    """Counts the token ids that it decodes; only 70 has a text."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return "C" * list(token_ids).count(70)


def test_detokenizing_when_tokens_have_no_text_is_linear() -> None:
    def cost(num_tokens: int) -> int:
        tokenizer = CountingTokenizer()
        stream = Detokenizer(tokenizer)
        assert not any(stream.push(1) for _ in range(num_tokens))
        assert stream.push(70) == "C"
        return tokenizer.num_decoded

    assert cost(4000) < 12 * cost(400)
