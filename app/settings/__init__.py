"""Settings: what an operator may set, where each value came from, and what is wrong with it."""

from app.settings.model import Settings
from app.settings.origin import Place, Source
from app.settings.problems import BadSettings, NeedsRestart, Problem
from app.settings.view import SettingView

__all__ = ["BadSettings", "NeedsRestart", "Place", "Problem", "SettingView", "Settings", "Source"]
