"""Files of an export beside its blocks: a head, and numbered parts that list the blocks in their order.

    export.json                         the head: what was exported and under which fingerprint, and whether it is whole
    parts/<number>.json                 a list of blocks, written once all of them are
    blocks/<namespace>/<3 digits>/<key> one block, see `kvferry.app.tiers.block_format`

The parts of an export that was interrupted list only blocks that are there, so that it can be imported as far as it
goes. No block comes before its parent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.app.tiers.block_format import BadBlock, pack_origin, unpack_origin
from kvferry.core.groups import GroupLayout
from kvferry.core.keys import RequestIdentity, group_of
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.slots import MAX_POSITION
from kvferry.core.scheduler.exchange import BlockEntry

HEAD = "export.json"
MAX_HEAD_BYTES = 1 << 20
MAX_PART_BYTES = 64 << 20
_VERSION = 1
_MAX_KEY_BYTES = 256
_MAX_NUMBER = 1 << 48
_UNKNOWN = RequestIdentity("")


class BadExport(Exception):
    """Contents of a file that are not those of an export; the message is constant text."""


@dataclass(frozen=True, slots=True)
class ExportHead:
    """Head of an export. The numbers are those of a whole one, 0 before."""

    fingerprint: Mapping[str, Any]
    engine: str
    began: str
    match: Mapping[str, str | None]
    is_whole: bool = False
    num_parts: int = 0
    num_blocks: int = 0
    num_bytes: int = 0


def part_name(number: int) -> str:
    """Return the name of a part, the first of which is number 0."""
    return f"parts/{number:06d}.json"


def plain_fingerprint(fingerprint: Mapping[str, object]) -> dict[str, Any]:
    """Return a fingerprint as it is read from a head."""
    plain: dict[str, Any] = json.loads(json.dumps(fingerprint, sort_keys=True, default=str))
    return plain


def pack_head(head: ExportHead) -> bytes:
    """Return the content of the head's file."""
    return json.dumps({"version": _VERSION, **asdict(head)}, indent=2).encode()


def unpack_head(data: bytes | memoryview) -> ExportHead:
    """Return the head in a file. Raises `BadExport`."""
    try:
        found = json.loads(bytes(data))
        version = found.pop("version")
        if version != _VERSION:
            raise BadExport("it was written by another version of kvferry")
        head = ExportHead(**found)
        numbers = (head.num_parts, head.num_blocks, head.num_bytes)
        if not (
            isinstance(head.fingerprint, dict) and isinstance(head.is_whole, bool) and all(map(_is_count, numbers))
        ):
            raise BadExport("its export.json has fields of another type")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadExport("its export.json cannot be read") from error
    return head


def pack_part(entries: Sequence[BlockEntry]) -> bytes:
    """Return the content of a part's file."""
    numbers = {origin: number for number, origin in enumerate(dict.fromkeys(entry.origin for entry in entries))}
    blocks = [
        [
            entry.key.hex(),
            entry.num_bytes,
            entry.position,
            f"{entry.parent:x}",
            entry.priority_class,
            numbers[entry.origin],
        ]
        for entry in entries
    ]
    return json.dumps({"origins": [pack_origin(origin).decode() for origin in numbers], "blocks": blocks}).encode()


def part_reader(layout: GroupLayout) -> Callable[[bytes | memoryview], list[BlockEntry]]:
    """Return a function that returns the blocks of a part's file, each once. The function raises `BadExport`."""

    def read(data: bytes | memoryview) -> list[BlockEntry]:
        try:
            found = json.loads(bytes(data))
            origins = [unpack_origin(text.encode()) or _UNKNOWN for text in found["origins"]]
            entries = [_to_entry(layout, origins, *columns) for columns in found["blocks"]]
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError, BadBlock) as error:
            raise BadExport("one of its parts cannot be read") from error
        return list({entry.key: entry for entry in entries}.values())

    return read


def _to_entry(
    layout: GroupLayout,
    origins: Sequence[RequestIdentity],
    key_hex: str,
    num_bytes: int,
    position: int,
    parent_hex: str,
    priority_class: int,
    origin: int,
) -> BlockEntry:
    """Check the columns of a block, which may be damaged. Raises `ValueError`, `TypeError` or `IndexError`."""
    key, parent = bytes.fromhex(key_hex), int(parent_hex, 16)
    is_key = 1 < len(key) <= _MAX_KEY_BYTES and group_of(key) < len(layout.groups)
    numbers = (num_bytes, position, priority_class, origin)
    if not is_key or not all(map(_is_count, numbers)) or position > MAX_POSITION or not 0 <= parent < 1 << 64:
        raise ValueError("a block has impossible fields")
    if num_bytes != layout.groups[group_of(key)].slot_bytes or priority_class not in PRIORITY_CLASS.values():
        raise ValueError("a block has an impossible length or class")
    return BlockEntry(key, num_bytes, position, parent, priority_class, origins[origin])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER
