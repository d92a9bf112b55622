"""Files of an export: lists of blocks that survive damage, folders that are only read, and the blocks in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.app.exports.block_files import ExportedBlocks
from kvferry.app.exports.manifest import BadExport, ExportHead, pack_head, pack_part, part_reader, unpack_head
from kvferry.app.exports.places import PlaceInUse, read_place
from kvferry.app.settings.tiers import ThreadedSettings
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.scheduler.exchange import BlockEntry
from tests.harness.tier_rig import FINGERPRINT, Rig
from tests.harness.tier_slots import SlotArray, key_of, keys_of

LAYOUT = GroupLayout([GroupSpec(16, 64), GroupSpec(16, 128)])
texts = st.text(max_size=8)
tenants = st.text("0123456789abcdef", min_size=16, max_size=16)
origins = st.builds(
    RequestIdentity, texts.filter(bool), st.none() | tenants, st.none() | texts, st.lists(texts, max_size=2).map(tuple)
)


@st.composite
def entries(draw: st.DrawFn) -> BlockEntry:
    group = draw(st.integers(0, 1))
    return BlockEntry(
        draw(st.binary(min_size=1, max_size=40)) + bytes([group]),
        LAYOUT.groups[group].slot_bytes,
        draw(st.integers(0, 1 << 20)),
        draw(st.integers(0, (1 << 64) - 1)),
        draw(st.sampled_from(sorted(PRIORITY_CLASS.values()))),
        draw(origins),
    )


lists = st.lists(entries(), max_size=6, unique_by=lambda entry: entry.key)


@given(lists)
def test_part_is_read_as_it_was_written(listed: list[BlockEntry]) -> None:
    assert part_reader(LAYOUT)(pack_part(listed)) == listed


@given(lists, st.data())
def test_part_that_is_damaged_lists_only_possible_blocks(listed: list[BlockEntry], data: st.DataObject) -> None:
    packed = bytearray(pack_part(listed))
    for at in data.draw(st.lists(st.integers(0, len(packed) - 1), min_size=1, max_size=3)):
        packed[at] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(0, len(packed))) or len(packed) :]
    try:
        found = part_reader(LAYOUT)(bytes(packed))
    except BadExport:
        return
    for entry in found:
        assert entry.num_bytes == LAYOUT.groups[entry.key[-1]].slot_bytes
        assert entry.priority_class in PRIORITY_CLASS.values()
    assert len({entry.key for entry in found}) == len(found)


@pytest.mark.parametrize(
    "columns",
    [
        ["00", 64, 0, "0", 1, 0],
        ["0102", 64, 0, "0", 1, 0],
        ["0100", 1, 0, "0", 1, 0],
        ["0100", True, 0],
        ["0100", 64, -1, "0", 1, 0],
        ["0100", 64, 1 << 31, "0", 1, 0],
    ],
)
def test_part_with_an_impossible_block_is_refused(columns: list[object]) -> None:
    with pytest.raises(BadExport):
        part_reader(LAYOUT)(json.dumps({"origins": ['["r", null, null, []]'], "blocks": [columns]}).encode())


def test_head_is_read_as_it_was_written() -> None:
    head = ExportHead({"model": "tiny"}, "engine", "2026-01-01T00:00:00Z", {"request": None}, True, 1, 2, 3)
    assert unpack_head(pack_head(head)) == head


def store_in(folder: Path, *, for_writing: bool, may_hold_blocks: bool = False) -> ExportedBlocks:
    files = read_place({"type": "fs", "path": folder.name}, folder.parent).open(for_writing=for_writing)
    return ExportedBlocks(files, FINGERPRINT, may_hold_blocks=may_hold_blocks)


def rig_of(store: ExportedBlocks) -> Rig:
    settings = ThreadedSettings(type="export", name="export", max_bytes=1)
    return Rig(SlotArray(16), lambda context: ThreadedTier(store, settings, context), lambda: None)


def test_blocks_are_read_from_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    rig = rig_of(store_in(folder, for_writing=True))
    assert rig.store(keys_of(range(8))) == [True] * 8
    with pytest.raises(PlaceInUse):
        store_in(folder, for_writing=True)
    rig.close()
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    readers = [rig_of(store_in(folder, for_writing=False)) for _ in range(2)]
    for reader in readers:
        assert reader.load(keys_of(range(9))) == [True] * 8 + [False]
        assert (reader.tier.counts().missing, reader.tier.health()) == (1, [])
        reader.close()
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))} == before


def test_block_that_is_damaged_or_another_one_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    rig = rig_of(store_in(folder, for_writing=True))
    rig.store(keys_of(range(4)))
    rig.close()
    paths = [next(folder.rglob(key_of(number).hex())) for number in range(4)]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    os.replace(paths[2], paths[1])
    reader = rig_of(store_in(folder, for_writing=False))
    assert reader.load(keys_of(range(4))) == [False, False, False, True]
    counts = reader.tier.counts()
    assert (counts.corrupt, counts.missing, counts.loaded) == (2, 1, 1)
    reader.close()


def test_blocks_of_an_interrupted_export_are_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    rig = rig_of(store_in(folder, for_writing=True))
    rig.store(keys_of(range(3)))
    rig.close()
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    (folder / "tmp/left").write_bytes(b"half a block")
    again = rig_of(store_in(folder, for_writing=True, may_hold_blocks=True))
    assert not (folder / "tmp/left").exists()
    assert again.store(keys_of(range(5))) == [True] * 5
    assert (again.tier.counts().present, again.tier.counts().stored) == (3, 2)
    again.close()
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_store_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    store = store_in(folder, for_writing=True)
    (folder / "blocks").rmdir()
    (folder / "blocks").write_text("in its place")
    with pytest.raises(StoreUnavailable) as refused:
        store.put_many(keys_of([1]), [memoryview(b"x")], [RequestIdentity("r")])
    assert store.problem == refused.value.text
    assert refused.value.text.startswith("Not a directory: blocks/")
    store.close()
