"""Fail if the project has outgrown its size: lines of Python by folder, and words of documentation.

A change that needs more names what leaves, or raises the number here and says in its commit why it is worth that.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = {"core": 16_050, "app": 34_150, "cuda_ops": 5_250, "bench": 6_700, "tests": 60_000, "docs": 33_250}
"""Sizes when they were last set; docs in words, all others in lines."""
ROOM = 1.05


def measure(folder: str) -> int:
    """Return the lines of a folder's Python, or the words of the documentation with the results of benchmarks."""
    if folder == "docs":
        pages = [ROOT / "README.md", ROOT / "bench" / "RESULTS.md", *(ROOT / "docs").glob("*.md")]
        return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    return sum(path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py"))


sizes = {folder: measure(folder) for folder in SIZES}
sys.stdout.write(f"sizes: {', '.join(f'{folder} {size:,}' for folder, size in sizes.items())}\n")
if grown := [folder for folder, size in sizes.items() if size > SIZES[folder] * ROOM]:
    sys.exit(f"more than 5% above the sizes in {Path(__file__).name}: {', '.join(grown)}")
