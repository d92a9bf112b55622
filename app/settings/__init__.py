"""Settings: fields, sources, validation and errors."""

from kvferry.app.settings.errors import BadSettings, NeedsRestart, Problem
from kvferry.app.settings.settings import Settings
from kvferry.app.settings.sources import SettingOrigin, Source
from kvferry.app.settings.view import SettingView

__all__ = ["BadSettings", "NeedsRestart", "Problem", "SettingOrigin", "SettingView", "Settings", "Source"]
