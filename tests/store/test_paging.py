"""Pages while rows come and go: nothing twice, nothing left out that was there all along, and filters that hold."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import delete, insert

from kvferry.app.api.pagination import _TIME_AND_ID
from kvferry.app.common.times import rfc3339
from kvferry.app.store import AuditEntry, EvictionFilter, JsonPage, MetadataStore
from kvferry.app.store.reader import _decode_cursor, _encode_cursor
from kvferry.app.store.schema import AUDIT, EVICTIONS
from kvferry.core.pool.inventory import Inventory
from kvferry.core.stats import EvictionReason
from tests.harness.effort import examples
from tests.harness.stores import START_S, Where, eviction, execute, items_of, open_store, running, write
from tests.harness.waiting import DEADLINE_S, wait_until

REASONS = (EvictionReason.CAPACITY, EvictionReason.OPERATOR)
REQUESTS = ("a", "b")
TENANTS = (None, "s", "t")


class PagingWhileRowsComeAndGo(RuleBasedStateMachine):
    """Rows are appended with times that may repeat or step back, trimmed at the old end, and read page by page."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store: MetadataStore
        self.rows: dict[int, Any] = {}
        self.number = 0
        self.reading = False

    @initialize()
    def start(self) -> None:
        self.store, manager = open_store(Path(self.folder.name) / "kvferry.db")
        self.store.start(Inventory(manager))

    def teardown(self) -> None:
        self.store.close(DEADLINE_S)
        self.folder.cleanup()

    @rule(
        offset_s=st.integers(-3, 3),
        size=st.integers(1, 4),
        reason=st.sampled_from(REASONS),
        request=st.sampled_from(REQUESTS),
        tenant=st.sampled_from(TENANTS),
    )
    def rows_come(self, offset_s: int, size: int, reason: EvictionReason, request: str, tenant: str | None) -> None:
        batch = eviction(
            range(self.number, self.number + size), START_S + self.number + offset_s, reason, request, tenant
        )
        self.number += size
        self.store.journal.append(batch)
        assert self.store.journal.flush(DEADLINE_S)
        self.rows = {item.id: item for item in self.everything()}
        assert {item.key for item in self.rows.values()} >= {key.hex() for key in batch.rows.keys}

    @precondition(lambda self: len(self.rows) > 3)
    @rule(share=st.floats(0.1, 0.6))
    def old_rows_go(self, share: float) -> None:
        oldest = sorted(self.rows.values(), key=lambda item: (item.time, item.id))
        gone = [item.id for item in oldest[: int(len(oldest) * share)]]
        dropped = delete(EVICTIONS).where(EVICTIONS.c.id.in_(gone))
        self.store.database.write(lambda connection: connection.execute(dropped).rowcount)
        for number in gone:
            del self.rows[number]

    @rule(
        limit=st.integers(1, 5),
        since=st.none() | st.integers(0, 40),
        until=st.none() | st.integers(0, 40),
        reason=st.none() | st.sampled_from(REASONS),
        request=st.none() | st.sampled_from(REQUESTS),
        tenant=st.none() | st.sampled_from(TENANTS[1:]),
    )
    def a_new_reading_begins(
        self,
        limit: int,
        since: int | None,
        until: int | None,
        reason: str | None,
        request: str | None,
        tenant: str | None,
    ) -> None:
        self.wanted = EvictionFilter(
            None if since is None else START_S + since,
            None if until is None else START_S + until,
            reason,
            request,
            tenant,
        )
        self.limit = limit
        self.cursor: str | None = None
        self.seen: list[Any] = []
        self.there_at_start = set(self.rows)
        self.reading = True

    @precondition(lambda self: self.reading)
    @rule()
    def a_page_is_read(self) -> None:
        page = self.store.reader.evictions(self.wanted, self.cursor, self.limit)
        items = items_of(page)
        assert len(items) <= self.limit
        self.seen += items
        self.cursor = page.next_cursor
        if self.cursor is None:
            self.reading = False
            throughout = {n for n in self.there_at_start & set(self.rows) if matches(self.rows[n], self.wanted)}
            assert throughout <= {item.id for item in self.seen}
        else:
            assert len(items) == self.limit

    @invariant()
    def what_was_read_is_in_order_and_matches(self) -> None:
        seen = getattr(self, "seen", [])
        places = [(item.time, item.id) for item in seen]
        assert places == sorted(set(places), reverse=True)
        assert all(matches(item, self.wanted) for item in seen)

    def everything(self) -> list[Any]:
        return items_of(self.store.reader.evictions(None, None, 1000))


def matches(item: Any, wanted: EvictionFilter) -> bool:
    return (
        (wanted.since_s is None or item.time >= wanted.since_s)
        and (wanted.until_s is None or item.time < wanted.until_s)
        and wanted.reason in (None, item.reason)
        and wanted.request in (None, item.request)
        and wanted.tenant in (None, item.tenant)
    )


TestPagingWhileRowsComeAndGo = PagingWhileRowsComeAndGo.TestCase
TestPagingWhileRowsComeAndGo.settings = settings(max_examples=examples(15), stateful_step_count=25)


def test_audit_is_paged_too(where: Where) -> None:
    with running(where) as (store, _):
        for number in range(7):
            write(
                store,
                store.writer.begin_audit,
                AuditEntry(START_S + number // 3, "admin", "", str(number), "PUT", "/x"),
            )
        audit = all_pages(lambda cursor: store.reader.audit(cursor, 2))
        assert [record.request_id for record in audit] == ["6", "5", "4", "3", "2", "1", "0"]


def test_page_of_any_text_and_json_is_their_json(where: Where) -> None:
    texts = ['\x01\x7f\n\t"\\\u2028\U0001f680', "caf\u00e9", "NULL", '{"a": 1}', ""]
    bodies = [{text: [text, 1.5, None, True, {"deep": 2**53}]} for text in texts]
    with running(where) as (store, _):
        for text, body in zip(texts, bodies, strict=True):
            write(
                store,
                store.writer.begin_audit,
                AuditEntry(START_S + 0.25, "admin", "", text, "PUT", "/x", body, 200, "applied"),
            )
        write(store, store.writer.begin_audit, AuditEntry(START_S - 1, "admin", "", "begun", "PUT", "/x"))
        items = items_of(store.reader.audit())
    assert [(item.request_id, item.what) for item in items[4::-1]] == list(zip(texts, bodies, strict=True))
    assert {item.time for item in items[:5]} == {START_S + 0.25}
    begun = items[5]
    assert (begun.time, begun.what, begun.status, begun.outcome) == (START_S - 1, None, None, None)


def test_times_of_a_page_are_cut_to_milliseconds(where: Where) -> None:
    times_s = [1787637746.1897662, 1787637746.0009999, 1787637746.9999999, 1787637746.189]
    with running(where) as (store, _):
        for time_s in times_s:
            write(store, store.writer.begin_audit, AuditEntry(time_s, "admin", "", "", "PUT", "/x"))
        shown = [item["time"] for item in json.loads(store.reader.audit().items)]
    assert sorted(shown) == sorted(map(rfc3339, times_s))


def test_audit_row_whose_body_is_not_json_is_listed_without_it(path: Path) -> None:
    with running(path) as (store, _):
        for number in range(2):
            entry = AuditEntry(START_S + number, "admin", "", "", "PUT", "/x", {"a": number})
            write(store, store.writer.begin_audit, entry)
        execute(path, "UPDATE audit SET what = '{' WHERE id = 1")
        assert [item.what for item in items_of(store.reader.audit())] == [{"a": 1}, None]


def test_cursor_within_equal_times_repeats_and_hides_nothing(where: Where) -> None:
    time_s = START_S + 0.1234567
    row = {"engine": "e", "token": "", "client": "", "method": "", "path": "", "request_id": ""}
    with running(where) as (store, _):
        rows = [{**row, "time": time_s + number // 4 * 1e-6} for number in range(11)]
        store.database.write(lambda connection: connection.execute(insert(AUDIT), rows).rowcount)
        ids = [item.id for item in all_pages(lambda cursor: store.reader.audit(cursor, 2))]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 11


def all_pages(read: Callable[[str | None], JsonPage]) -> list[Any]:
    """Every page, each but the last of two items, with no more pages than it takes."""
    items: list[Any] = []
    cursor: str | None = None
    while True:
        page = read(cursor)
        found = items_of(page)
        assert 1 <= len(found) <= 2
        items += found
        cursor = page.next_cursor
        if cursor is None:
            return items
        assert len(found) == 2


@given(st.floats(0, 1e200, exclude_min=True), st.integers(0, 10**18 - 1))
@settings(derandomize=True)
def test_cursor_when_decoded_equals_the_encoded_values(time_s: float, number: int) -> None:
    cursor = _encode_cursor("audit", time_s, number)
    assert re.fullmatch("audit" + _TIME_AND_ID.rstrip("$"), cursor)
    assert _decode_cursor(cursor) == (time_s, number)


def test_readers_go_on_beside_the_writer(where: Where) -> None:
    """Each page is of one moment: batches of ten are seen whole or not at all."""
    stop = threading.Event()
    failures: list[BaseException] = []
    reads = [0, 0, 0]
    with running(where, max_queued_rows=1_000_000) as (store, _):

        def read(reader: int) -> None:
            try:
                while not stop.is_set() or not reads[reader]:
                    summary = store.reader.eviction_summary()
                    assert summary.total % 10 == 0
                    items = items_of(store.reader.evictions(limit=1000))
                    assert len({item.id for item in items}) == len(items)
                    reads[reader] += 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
        for thread in threads:
            thread.start()
        for batch in range(400):
            store.journal.append(eviction(range(batch * 10, batch * 10 + 10), START_S + batch))
        wait_until(lambda: store.journal.stats().written == 4000, "all is written")
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert failures == []
        assert min(reads) > 0
        assert store.reader.eviction_summary().total == 4000
