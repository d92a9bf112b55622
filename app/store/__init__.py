"""Metadata store: slots, history, overrides, rules and audit in an SQL database, written behind the engine."""

from kvferry.app.store.errors import DatabaseUnavailable, OutcomeUnknown, StoreError
from kvferry.app.store.history import EvictionSummary
from kvferry.app.store.intents import AuditEntry, StoredReset
from kvferry.app.store.journal import JournalStats
from kvferry.app.store.name_claim import NameClaim, check_name, claim_name
from kvferry.app.store.reader import EvictionFilter, JsonPage, Page
from kvferry.app.store.retention import HistoryLimits
from kvferry.app.store.store import MetadataStore, check_database, upgrade
from kvferry.app.store.threads import Change, StoreThreads, database_only

__all__ = [
    "AuditEntry",
    "Change",
    "DatabaseUnavailable",
    "EvictionFilter",
    "EvictionSummary",
    "HistoryLimits",
    "JournalStats",
    "JsonPage",
    "MetadataStore",
    "NameClaim",
    "OutcomeUnknown",
    "Page",
    "StoreError",
    "StoreThreads",
    "StoredReset",
    "check_database",
    "check_name",
    "claim_name",
    "database_only",
    "upgrade",
]
