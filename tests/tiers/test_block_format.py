"""The format of a block in any store: what verifies, what does not, and that older stores stay readable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.app.tiers.block_format import (
    HEADER_BYTES,
    MAX_ORIGIN_BYTES,
    BadBlock,
    decode,
    encode,
    namespace_of,
    origin_range,
    unpack_origin,
)
from kvferry.core.keys import RequestIdentity
from tests.harness.tier_slots import ORIGIN, key_of

NAMESPACE = namespace_of({"model": "tiny"})
KEY = key_of(1)
DATA = bytes(range(256)) * 4
VALUE = b"".join(encode(NAMESPACE, KEY, memoryview(DATA), ORIGIN))


def read(value: bytes, namespace: bytes = NAMESPACE, number: int = 1, length: int = len(DATA)) -> object:
    origin, data = decode(namespace, key_of(number), value, length)
    assert data == DATA
    return origin


def test_encoded_block_is_decoded_with_its_origin() -> None:
    assert read(VALUE) == ORIGIN
    start, length = origin_range(VALUE[:HEADER_BYTES], len(VALUE))
    assert unpack_origin(VALUE[start : start + length]) == ORIGIN


def test_format_does_not_change_unnoticed() -> None:
    """Folders of earlier versions hold blocks of this very header."""
    assert NAMESPACE.hex() == "39421ca3561ec521"
    assert VALUE[:HEADER_BYTES].hex() == "6b76666572727901000000002e0000000004000000000000dc585ee1d22db49d"
    assert VALUE[HEADER_BYTES:] == DATA + b'["r1", "0123456789abcdef", "sql", ["alias-1"]]'


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: bytes(len(value)),
        lambda value: b"",
        lambda value: value[:50] + bytes([value[50] ^ 1]) + value[51:],
        lambda value: value[:24] + bytes([value[24] ^ 1]) + value[25:],
        lambda value: value[:-4] + b"#" + value[-3:],
    ],
)
def test_spoiled_block_is_not_decoded(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BadBlock):
        read(spoil(VALUE))


def test_block_of_another_key_model_or_length_is_not_decoded() -> None:
    for other in ({"number": 2}, {"namespace": namespace_of({"model": "other"})}, {"length": len(DATA) - 1}):
        with pytest.raises(BadBlock):
            read(VALUE, **other)


@pytest.mark.parametrize("session", ["s", "x" * 256, 'ask "b" /%é'])
def test_session_is_stored_behind_what_earlier_versions_store(session: str) -> None:
    origin = replace(ORIGIN, session=session)
    value = b"".join(encode(NAMESPACE, KEY, memoryview(DATA), origin))
    assert value[HEADER_BYTES + len(DATA) :].startswith(VALUE[HEADER_BYTES + len(DATA) : -1])
    assert read(value) == origin


@pytest.mark.parametrize("more", ["7", "true", '""', '["s"]', "{}", f'"{"x" * 257}"', '"\\ud800"', '"s", "t"'])
def test_forged_session_is_no_origin(more: str) -> None:
    with pytest.raises(BadBlock):
        unpack_origin(f'["r1", null, null, [], {more}]'.encode())


def test_origin_when_too_long_is_left_out() -> None:
    origin = RequestIdentity("r" * MAX_ORIGIN_BYTES, None, None)
    assert read(b"".join(encode(NAMESPACE, KEY, memoryview(DATA), origin))) is None
