"""kvferry: moves KV-cache blocks of LLM engines to host memory and back, and decides which."""

__version__ = "0.1.0"
"""The version of this release: the only place that has it."""
