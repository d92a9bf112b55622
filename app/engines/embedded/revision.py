"""What tells one set of weights from another under the same name: KV computed with the one is wrong for the other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json")
EDGE_BYTES = 1 << 20


def revision_of(name: str, config: Any) -> str | None:
    """The hub's commit, or for a local folder a digest of its weight and config files; None when neither is known."""
    folder = Path(name)
    if folder.is_dir():
        return f"files-{_digest(folder)}"
    commit = getattr(config, "_commit_hash", None)
    return str(commit) if commit else None


def _digest(folder: Path) -> str:
    """Names, sizes, times, and the first and last MiB: weights of many gigabytes are not read for a name."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES):
        about = path.stat()
        digest.update(f"{path.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(about.st_size - EDGE_BYTES, 0))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()[:16]
