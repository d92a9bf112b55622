"""`make release`: what it refuses, and that what it builds is complete, installs and is the same each time."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import __version__
from tests.deploy.conftest import ROOT

SECTION = f"## Unreleased\n\n## {__version__} - 2026-01-02\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of its own with the files of this checkout, whose changelog has no section for the version."""
    folder = tmp_path / "checkout"
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or not in a checkout")
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    changes = (folder / "CHANGELOG.md").read_text().replace(f"## {__version__}", "## another")
    (folder / "CHANGELOG.md").write_text(changes)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=test", "-c", "user.email=test@example.org", *words], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "test")


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/release.py", *words]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=900)


def add_section(folder: Path) -> None:
    changes = folder / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Unreleased\n", SECTION, 1))


def test_release_of_an_unready_checkout_is_refused_by_name(checkout: Path) -> None:
    without_section = release(checkout)
    assert without_section.returncode == 2
    assert f"CHANGELOG.md has no section for {__version__}" in without_section.stderr
    add_section(checkout)
    changed = release(checkout)
    assert changed.returncode == 2
    assert "1 files are not committed, such as CHANGELOG.md" in changed.stderr
    assert not (checkout / "dist").exists()


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def components(bill: Path) -> set[str]:
    return {component["name"].lower() for component in json.loads(bill.read_text())["components"]}


@pytest.mark.long
def test_release_is_complete_installs_and_is_the_same_each_time(checkout: Path, tmp_path: Path) -> None:
    add_section(checkout)
    commit(checkout)
    built = [tmp_path / name / f"kvferry-{__version__}" for name in ("one", "two")]
    for folder, extras in zip(built, ("redis", ""), strict=True):
        done = release(checkout, "--out", str(folder.parent), "--extras", extras)
        assert done.returncode == 0, done.stderr
    name = f"kvferry-{__version__}"
    files = digests(built[0])
    wheel, sdist, bill, bill_of_redis = (
        f"{name}{end}" for end in ("-py3-none-any.whl", ".tar.gz", ".cdx.json", "-redis.cdx.json")
    )
    assert files.keys() == {wheel, sdist, bill, bill_of_redis, "SHA256SUMS"}
    assert digests(built[1]).items() - files.items() == {("SHA256SUMS", digests(built[1])["SHA256SUMS"])}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=built[0], check=True)
    assert {"kvferry", "fastapi", "numba"} < components(built[0] / bill)
    assert not {"torch", "transformers", "redis", "pip"} & components(built[0] / bill)
    assert components(built[0] / bill_of_redis) - components(built[0] / bill) == {"redis", "hiredis"}
    assert str(tmp_path) not in (built[0] / bill).read_text()
    # The sdist is enough to build from, without the repository.
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, built[0] / sdist]
    subprocess.run(pip, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / wheel).exists()
