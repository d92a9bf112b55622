"""The metadata store: slots, history and what operators want, in SQLite, written behind the engine."""

from kvferry.app.store.cursors import Page
from kvferry.app.store.database import Database, check_database, downgrade, upgrade
from kvferry.app.store.errors import StoreError, StoreUnavailable
from kvferry.app.store.intents import Intents
from kvferry.app.store.journal import Journal, JournalStats
from kvferry.app.store.migrate import Upgrade
from kvferry.app.store.name_claim import NameClaim, check_name, claim_name
from kvferry.app.store.projection import DirtySource
from kvferry.app.store.queries import StoreReader
from kvferry.app.store.records import (
    AgeBucket,
    AuditEntry,
    AuditRecord,
    EvictionFilter,
    EvictionRecord,
    EvictionSummary,
    OverrideRecord,
    RuleRecord,
    SlotRecord,
)
from kvferry.app.store.store import Store
from kvferry.app.store.trim import HistoryLimits

__all__ = [
    "AgeBucket",
    "AuditEntry",
    "AuditRecord",
    "Database",
    "DirtySource",
    "EvictionFilter",
    "EvictionRecord",
    "EvictionSummary",
    "HistoryLimits",
    "Intents",
    "Journal",
    "JournalStats",
    "NameClaim",
    "OverrideRecord",
    "Page",
    "RuleRecord",
    "SlotRecord",
    "Store",
    "StoreError",
    "StoreReader",
    "StoreUnavailable",
    "Upgrade",
    "check_database",
    "check_name",
    "claim_name",
    "downgrade",
    "upgrade",
]
