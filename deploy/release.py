"""Build a release of the commit that is checked out: sdist, wheel, bills of materials and checksums.

    release.py [--out FOLDER] [--extras "redis object"]

The same commit gives the same bytes: the files are those of the commit, with its date and without owners. The folder
`FOLDER/kvferry-VERSION` appears once everything has been built and the wheel has been installed and run.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVELOPMENT = "dev"
"""The extra with the tools of developers, which is not released."""


class Refused(Exception):
    """The checkout is not in a state that can be released; the text says what to change."""


def main() -> int:
    extras = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    extras.remove(DEVELOPMENT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist in the checkout")
    parser.add_argument("--extras", default=" ".join(extras), help="extras with a bill of materials; default: all")
    parser.add_argument("--index", help="an index of packages besides the usual one, for PyTorch's builds for the CPU")
    options = parser.parse_args()
    try:
        version = released_version()
    except Refused as reason:
        sys.stderr.write(f"no release: {reason}\n")
        return 2
    # What tools write into archives does not depend on the caller's permissions.
    os.umask(0o022)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-release-", dir=options.out) as folder:
        build(Path(folder), version, options.extras.split(), options.index)
        target = options.out / f"kvferry-{version}"
        shutil.rmtree(target, ignore_errors=True)
        (Path(folder) / "release").rename(target)
    for path in sorted(target.iterdir()):
        sys.stdout.write(f"{path.stat().st_size:>12,} {path}\n")
    return 0


def released_version() -> str:
    """Return the version of the checkout.

    Raises:
        Refused: Files are not committed, or the changelog does not have the version.
    """
    changed = run("git", "status", "--porcelain", cwd=ROOT).splitlines()
    if changed:
        raise Refused(f"{len(changed)} files are not committed, such as {changed[0][3:]}; commit or remove them")
    for statement in ast.parse((ROOT / "__init__.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__version__":
            version = str(ast.literal_eval(statement.value))
    if not re.search(rf"^## \[?{re.escape(version)}\]?(?: |$)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise Refused(f"CHANGELOG.md has no section for {version}; add `## {version} - DATE` below `## Unreleased`")
    return version


def build(folder: Path, version: str, extras: list[str], index: str | None) -> None:
    """Make the folder `release`, with all files, in an empty folder."""
    date = int(run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    os.environ["SOURCE_DATE_EPOCH"] = str(date)
    release = folder / "release"
    release.mkdir()
    archive = folder / "commit.tar"
    run("git", "archive", "--output", str(archive), "HEAD", cwd=ROOT)
    unpack(archive, folder / "commit")
    tool = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*tool, str(release), "--sdist", cwd=folder / "commit")
    (sdist,) = release.glob("*.tar.gz")
    set_dates(sdist, date)
    # The wheel is built from the sdist, so that an incomplete one fails here.
    unpack(sdist, folder / "sdist")
    run(*tool, str(release), "--wheel", cwd=folder / "sdist" / f"kvferry-{version}")
    (wheel,) = release.glob("*.whl")
    base = folder / "base"
    run(sys.executable, "-m", "venv", "--without-pip", str(base), cwd=folder)
    install(base, str(wheel), index)
    found = run(str(base / "bin" / "kvferry"), "--version", cwd=folder).strip()
    if found != f"kvferry {version}":
        raise RuntimeError(f"the installed wheel is {found}, not kvferry {version}")
    write_bill(base, release / f"kvferry-{version}.cdx.json")
    for extra in extras:
        # Links: an installation replaces files, and changes none.
        environment = Path(shutil.copytree(base, folder / extra, symlinks=True, copy_function=os.link))
        install(environment, f"{wheel}[{extra}]", index)
        write_bill(environment, release / f"kvferry-{version}-{extra}.cdx.json")
        shutil.rmtree(environment)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(release.iterdir())]
    (release / "SHA256SUMS").write_text("".join(sums))


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def set_dates(sdist: Path, date: int) -> None:
    """Write an sdist anew: members by name, with one date and without owners, which its build tool does not do."""
    with tarfile.open(sdist) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()}
        contents = {name: file.read() for name, file in sorted(files.items()) if file is not None}
    with (
        sdist.open("wb") as raw,
        # Without the name of the file, which a compressed file has by default.
        gzip.GzipFile("", "wb", fileobj=raw, mtime=date) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), date, 0o644
            tar.addfile(member, BytesIO(content))


def install(environment: Path, requirement: str, index: str | None) -> None:
    """Install into an environment that has no pip, so that the bill of materials has what is needed alone."""
    pip = (sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"))
    more = ("--extra-index-url", index) if index else ()
    # Compiled files would be in no bill, and take half of the time.
    constraints = ("-c", str(ROOT / "constraints.txt"))
    run(*pip, "install", "--quiet", "--no-compile", *constraints, *more, requirement, cwd=environment)
    # Where the wheel lay on this machine does not belong in a bill of materials.
    for path in environment.glob("lib/*/site-packages/kvferry-*.dist-info/direct_url.json"):
        path.unlink()


def write_bill(environment: Path, path: Path) -> None:
    """Write the bill of materials of an environment, in CycloneDX's JSON."""
    tool = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--output-file", str(path))
    run(*tool, str(environment / "bin" / "python"), cwd=environment)


def run(*words: str, cwd: Path) -> str:
    """Run a command and return its output; what it prints about errors goes to the terminal."""
    return subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
