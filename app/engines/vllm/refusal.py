"""How the connector says no: one error that vLLM's start ends with, whose message names what to change."""


class ConnectorRefused(ValueError):
    """What was asked for cannot be served inside this vLLM; the message says which setting, and what would be right."""
