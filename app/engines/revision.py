"""What tells one set of weights from another under the same name: KV computed with the one is wrong for the other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
EDGE_BYTES = 1 << 20


def revision_of(name: str, config: Any) -> str | None:
    """The hub's commit, or for local files a digest of weights and configuration; None when neither is known."""
    found = digest_of_files(Path(name))
    if found is not None:
        return f"files-{found}"
    commit = getattr(config, "_commit_hash", None)
    return str(commit) if commit else None


def digest_of_files(path: Path) -> str | None:
    """16 hex digits over the weight and config files of a folder, or over one file; None where there is none.

    Names, sizes, times, and the first and last MiB, for weights of many gigabytes are not read for a name. Raises
    `OSError`.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    else:
        files = [path] if path.is_file() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        about = file.stat()
        digest.update(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(EDGE_BYTES))
            opened.seek(max(about.st_size - EDGE_BYTES, 0))
            digest.update(opened.read(EDGE_BYTES))
    return digest.hexdigest()[:16]
