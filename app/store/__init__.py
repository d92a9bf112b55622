"""Metadata store: slots, history, overrides, rules and audit in an SQL database, written behind the engine."""

from kvferry.app.store.database import Database, StoreThreads
from kvferry.app.store.errors import OutcomeUnknown, StoreError, StoreUnavailable
from kvferry.app.store.history import AgeBucket, EvictionSummary
from kvferry.app.store.intents import AuditEntry, Intents, OverrideRecord
from kvferry.app.store.journal import Journal, JournalStats
from kvferry.app.store.migrate import Upgrade
from kvferry.app.store.name_claim import NameClaim, check_name, claim_name
from kvferry.app.store.reader import AuditRecord, EvictionFilter, EvictionRecord, Page, StoreReader
from kvferry.app.store.retention import HistoryLimits
from kvferry.app.store.slot_rows import DirtySource, SlotColumns
from kvferry.app.store.store import MetadataStore, check_database, downgrade, upgrade

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
    "MetadataStore",
    "NameClaim",
    "OutcomeUnknown",
    "OverrideRecord",
    "Page",
    "SlotColumns",
    "StoreError",
    "StoreReader",
    "StoreThreads",
    "StoreUnavailable",
    "Upgrade",
    "check_database",
    "check_name",
    "claim_name",
    "downgrade",
    "upgrade",
]
