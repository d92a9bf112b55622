"""Default name of an engine, under which its pool, database rows and discovery file are found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_CHARS = 40
_DIGITS = 8


def name_of_engine(model: str, fingerprint: Mapping[str, object]) -> str:
    """Return the model's name, made readable, with a digest of everything that changes the meaning of its bytes."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    short = "".join(char if char.isalnum() else "-" for char in model.rstrip("/").rsplit("/", 1)[-1])
    return f"{short[:_CHARS]}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


def is_missing_folder(model: str) -> bool:
    """Return whether a model's name is the path of a missing folder, which would be taken for a hub id."""
    return model.startswith(("/", "./", "../", "~")) and not Path(model).is_dir()
