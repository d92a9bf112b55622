"""The name of an engine that was given none: its pool, its rows and its discovery file are found by it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_CHARS = 40
_DIGITS = 8


def name_of_engine(model: str, fingerprint: Mapping[str, object]) -> str:
    """The model's name, readable, and a digest that tells apart all that changes what its bytes mean."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    short = "".join(char if char.isalnum() else "-" for char in model.rstrip("/").rsplit("/", 1)[-1])
    return f"{short[:_CHARS]}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


def is_missing_folder(model: str) -> bool:
    """Whether a model's name is a path where no folder is, and would be taken for the id of a model on the hub."""
    return model.startswith(("/", "./", "../", "~")) and not Path(model).is_dir()
