"""Settings: fields, sources, validation and errors."""

from kvferry.app.settings.errors import BadSettings, NeedsRestart, Problem
from kvferry.app.settings.settings import Settings, SettingView
from kvferry.app.settings.sources import SettingOrigin, Source

__all__ = ["BadSettings", "NeedsRestart", "Problem", "SettingOrigin", "SettingView", "Settings", "Source"]
