"""Settings: what an operator may set, where each value came from, and what is wrong with it."""

from kvferry.app.settings.model import Settings
from kvferry.app.settings.origin import Place, Source
from kvferry.app.settings.problems import BadSettings, NeedsRestart, Problem
from kvferry.app.settings.view import SettingView

__all__ = ["BadSettings", "NeedsRestart", "Place", "Problem", "SettingView", "Settings", "Source"]
