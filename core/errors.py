"""Errors that several packages share."""


class StartError(ValueError):
    """kvferry cannot start as configured; the message names the setting, its value and what to do."""
