"""A tier of one SQLite database."""

import sqlite3
import threading
from contextlib import contextmanager

from pydantic import Field

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.settings.types import FolderPath
from kvferry.app.tiers.block_format import BadBlock, decode, encode, namespace_of
from kvferry.app.tiers.block_store import BlockResult, BlockStore, Outcome, StoreUnavailable, TierRefused
from kvferry.core.tiers.base import TierCounts

TABLE = "CREATE TABLE IF NOT EXISTS blocks (name BLOB PRIMARY KEY, value BLOB)"


class AcmeStore(BlockStore):
    batch_blocks = 32

    def __init__(self, path, namespace, max_bytes):
        self.database = sqlite3.connect(path, check_same_thread=False)
        self.namespace, self.max_bytes = namespace, max_bytes
        self.lock = threading.Lock()
        self.evicted = 0
        with self.database as database:
            database.execute(TABLE)
            self.measure(database)

    @contextmanager
    def transaction(self):
        try:
            with self.lock, self.database as database:
                yield database
        except sqlite3.Error as error:
            raise StoreUnavailable("the database cannot be used") from error

    def measure(self, database):
        row = database.execute("SELECT count(*), coalesce(sum(length(value)), 0) FROM blocks").fetchone()
        self.num_blocks, self.num_bytes = row

    def probe(self):
        with self.transaction() as database:
            database.execute("SELECT 1 FROM blocks LIMIT 1").fetchone()

    def find_many(self, keys):
        found = "SELECT count(*) FROM blocks WHERE name = ?"
        with self.transaction() as database:
            return [bool(database.execute(found, [self.namespace + key]).fetchone()[0]) for key in keys]

    def put_many(self, keys, data, origins):
        with self.transaction() as database:
            outcomes = [self.put(database, *block) for block in zip(keys, data, origins, strict=True)]
            while self.num_bytes > self.max_bytes:
                oldest = "DELETE FROM blocks WHERE rowid = (SELECT min(rowid) FROM blocks)"
                self.evicted += database.execute(oldest).rowcount
                self.measure(database)
            return outcomes

    def put(self, database, key, data, origin):
        name = self.namespace + key
        value = b"".join(encode(self.namespace, key, data, origin))
        insert = "INSERT OR IGNORE INTO blocks VALUES (?, ?)"
        if not database.execute(insert, [name, value]).rowcount:
            return Outcome.PRESENT
        self.num_blocks, self.num_bytes = self.num_blocks + 1, self.num_bytes + len(value)
        return Outcome.STORED

    def get_many(self, keys, into):
        with self.transaction() as database:
            return [self.get(database, *block) for block in zip(keys, into, strict=True)]

    def get(self, database, key, into):
        row = database.execute("SELECT value FROM blocks WHERE name = ?", [self.namespace + key]).fetchone()
        if row is None:
            return BlockResult(Outcome.MISSING)
        try:
            return BlockResult(Outcome.LOADED, *decode(self.namespace, key, row[0], len(into)))
        except BadBlock:
            return BlockResult(Outcome.CORRUPT)

    def drop(self, keys):
        with self.transaction() as database:
            database.executemany("DELETE FROM blocks WHERE name = ?", [[self.namespace + key] for key in keys])
            self.measure(database)

    def reset(self, stop):
        before = self.num_blocks, self.num_bytes
        with self.transaction() as database:
            database.execute("DELETE FROM blocks WHERE substr(name, 1, ?) = ?", [len(self.namespace), self.namespace])
            self.measure(database)
        return before[0] - self.num_blocks, before[1] - self.num_bytes

    def maintain(self, stop):
        pass

    def size(self):
        return TierCounts(self.num_blocks, self.num_bytes, self.max_bytes, evicted=self.evicted)

    def close(self):
        self.database.close()


class AcmeSettings(TierSettings):
    path: FolderPath = Field(description="folder of the database")


class AcmeTier:
    Settings = AcmeSettings

    @staticmethod
    def open(settings, context):
        try:
            settings.path.mkdir(parents=True, exist_ok=True)
            return AcmeStore(settings.path / "blocks.db", namespace_of(context.fingerprint), settings.max_bytes)
        except (OSError, sqlite3.Error) as error:
            raise TierRefused(
                f"KVFERRY_TIERS: tier {context.name}: path={settings.path} cannot be used; name a folder that kvferry "
                "may write to"
            ) from error
