"""Break every rule, one at a time, and see that the tests go red: `python -m tests.mutants [NAME...]`.

Each mutation is made in a copy of the tree, and the tests that are named for it are run there; a name stands for all
mutations that it is part of, and a number for those of that rule. With `--simulate` it is the simulator's turn instead:
which of them show in a few thousand steps of its worlds? Ends with 1 if a mutation survives, cannot be made, or if the
tests fail without any. One that hangs is as good as killed, and is shown as such: on a busy machine, look again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("app", "core", "cuda_ops", "migrations", "tests", "bench", "docs", "pyproject.toml", "README.md")
SIMULATE = ["tests.sim", "1", "150", "--seeds", "60"]
PASSED, FAILED, HUNG = 0, 1, -1
LIMIT_S = 300


def copy_tree(target: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)
    return target


def run(tree: Path, command: Sequence[str]) -> tuple[int, str]:
    """A Python module's exit status, and the last it said; `HUNG` if it came to no end."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "unshrunk"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return HUNG, f"no end after {LIMIT_S} s"
    return done.returncode, done.stdout[-1000:]


_seconds = itertools.count(int(time.time()))


def write(file: Path, text: str) -> None:
    """Write a source file. Bytecode is told to be out of date by the second of its source, so no two share one."""
    file.write_text(text)
    second = next(_seconds)
    os.utime(file, (second, second))


def command_for(tests: Sequence[str], simulate: bool) -> list[str]:
    return SIMULATE if simulate else ["pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]


def verdict(mutation: Mutation, tree: Path, simulate: bool) -> str:
    file = tree / mutation.path
    text = file.read_text()
    if text.count(mutation.old) != 1:
        return "DOES NOT APPLY"
    write(file, text.replace(mutation.old, mutation.new))
    try:
        status, _ = run(tree, command_for(mutation.tests, simulate))
    finally:
        write(file, text)
    return {PASSED: "SURVIVED", FAILED: "killed", HUNG: "hung"}.get(status, f"NO VERDICT (pytest ended with {status})")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutations whose name contains this, or the number of a rule")
    parser.add_argument("--simulate", action="store_true", help="run the simulator instead of the tests")
    options = parser.parse_args()
    chosen = [
        m for m in MUTATIONS if not options.names or any(n in m.name or n == str(m.number) for n in options.names)
    ]
    if not chosen:
        parser.error(f"no mutation is called so: {', '.join(options.names)}")
    started = time.monotonic()
    num_workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(num_workers):
            trees.put(copy_tree(Path(folder) / str(number)))

        def judge(mutation: Mutation) -> str:
            tree = trees.get()
            try:
                return verdict(mutation, tree, options.simulate)
            finally:
                trees.put(tree)

        all_tests = sorted({test for mutation in chosen for test in mutation.tests})
        tree = trees.get()
        status, said = run(tree, command_for(all_tests, options.simulate))
        if status != PASSED:
            print(f"without any mutation these tests do not pass, so they prove nothing:\n{said}")
            return 1
        trees.put(tree)
        with ThreadPoolExecutor(num_workers) as threads:
            verdicts = []
            for mutation, said in zip(chosen, threads.map(judge, chosen), strict=True):
                verdicts.append(said)
                print(f"{mutation.number:>3}  {said:<10}  {mutation.name}  ({mutation.path})", flush=True)
    hung = verdicts.count("hung")
    killed = verdicts.count("killed") + hung
    print(f"{killed} of {len(chosen)} mutations killed ({hung} by hanging), in {time.monotonic() - started:.0f} s")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
