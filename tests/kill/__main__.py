"""`python -m tests.kill ROUNDS [SEED]`: kill the small process repeatedly, and print what its successors recovered."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.kill.driver import Driver
from tests.kill.small import Note

LIFE_S = 0.25
EARLY_S = 0.1
EARLY_CHANCE = 0.15
TOTALS = (Note.WRONG, Note.CHECKED, Note.STEPS, Note.RESETS, Note.DELETIONS, Note.RESIZES)


def kill_rounds(folder: Path, rounds: int, seed: int, enough: Mapping[str, int] | None = None) -> dict[str, float]:
    """Kill `rounds` times, and more often, at most ten times, until each counter of `enough` is above its value.

    A slow machine does less in a round. Returns the counters of all rounds together.
    """
    picks = random.Random(seed)
    found = Counter(seed=seed, rounds=0, deaths_at_start=0, deaths_in_resizes=0)
    begun_s = time.monotonic()
    with Driver(folder) as driver:
        while found["rounds"] < 10 * rounds and (
            found["rounds"] < rounds or any(found[name] <= least for name, least in (enough or {}).items())
        ):
            found["rounds"] += 1
            early_s = picks.uniform(0, EARLY_S) if picks.random() < EARLY_CHANCE else None
            life = driver.live(picks.getrandbits(32), min(picks.expovariate(1 / LIFE_S), 4 * LIFE_S), early_s)
            for note in TOTALS:
                found[note.name.lower()] = driver.notes[note]
            if not life.served:
                found["deaths_at_start"] += 1
                continue
            found.update(with_row=life.known, hits=life.hits, corrupt=life.corrupt)
            if life.resizing_before:
                found["deaths_in_resizes"] += 1
                continue
            # Blocks published since the last note are missing in it.
            left = max(life.ready_before - life.cut, 0)
            recovered = min(life.recovered, left)
            found.update(ready_at_kill=left, recovered=recovered, unexplained=max(left - recovered - life.unsealed, 0))
    ready = max(found["ready_at_kill"], 1)
    return {
        **found,
        "seconds": round(time.monotonic() - begun_s, 1),
        "recovered_share": round(found["recovered"] / ready, 4),
        "unexplained_share": round(found["unexplained"] / ready, 4),
    }


def main() -> int:
    """Run the rounds; 1 if a byte was wrong or a dropped block came back."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().getrandbits(31)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-kill-") as folder:
        report = kill_rounds(Path(folder), rounds, seed)
    print(json.dumps(report, indent=2))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
