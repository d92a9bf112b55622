"""The settings in force: those read at start, with what was changed over HTTP since laid over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from app.settings import Settings


class LiveSettings:
    """Frozen settings that can be exchanged while running. Thread-safe.

    `apply` is called with the new settings before they are in force, and carries them to whoever holds a copy; it must
    not raise for values that validated. The caller of `change` waits for it. Changes are forgotten at the next start.
    """

    def __init__(self, at_start: Settings, apply: Callable[[Settings], None]) -> None:
        self._at_start = at_start
        self._apply = apply
        self._changes: dict[str, Any] = {}
        self._current = at_start
        self._lock = threading.Lock()

    @property
    def current(self) -> Settings:
        """The settings in force now."""
        return self._current

    def change(self, patch: Mapping[str, Any]) -> Settings:
        """Change some settings; None gives one its value at start back.

        Raises `BadSettings` for unknown names and bad values, `NeedsRestart` for settings that are fixed while running.
        """
        mutable = set(Settings.mutable_names())
        with self._lock:
            taken_back = {name for name, value in patch.items() if value is None and name in mutable}
            given = {name: value for name, value in patch.items() if name not in taken_back}
            changes = {name: value for name, value in self._changes.items() if name not in taken_back} | given
            settings = self._at_start.change(changes)
            self._apply(settings)
            self._changes = changes
            self._current = settings
            return settings
