"""Programs and libraries of Debian that some tests use; a test that misses one is skipped, and says which."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def skip_without(package: str, is_installed: object) -> None:
    """Skip the test if something of a Debian package is missing; `package` may name several."""
    if not is_installed:
        pytest.skip(f"needs Debian's {package}: apt-get install {package}")


def installed(program: str, package: str) -> str:
    """Return the path of a program, or skip the test."""
    path = shutil.which(program)
    skip_without(package, path)
    return str(path)


def postgres_binaries() -> Path:
    """Return the folder of `initdb` and `pg_ctl`, on the path or where Debian's package puts them, or skip the test."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    skip_without("postgresql", found)
    return found[-1].parent
