"""`python -m tests.kill ROUNDS [SEED]`: kill the small process so many times, and say what came back."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.kill.driver import Driver
from tests.kill.small import Note

LIFE_S = 0.25
EARLY_S = 0.1
EARLY_CHANCE = 0.15


def kill_rounds(folder: Path, rounds: int, seed: int) -> dict[str, object]:
    """What there was and what came back, in all rounds together."""
    picks = random.Random(seed)
    ready = unexplained = recovered = known = hits = corrupt = deaths_at_start = deaths_in_resizes = 0
    begun_s = time.monotonic()
    with Driver(folder) as driver:
        for _ in range(rounds):
            early_s = picks.uniform(0, EARLY_S) if picks.random() < EARLY_CHANCE else None
            life = driver.live(picks.getrandbits(32), min(picks.expovariate(1 / LIFE_S), 4 * LIFE_S), early_s)
            if not life.served:
                deaths_at_start += 1
                continue
            # What was published since the last note may be more than was noted.
            left = max(life.ready_before - life.cut, 0)
            if life.resizing_before:
                deaths_in_resizes += 1
            else:
                ready += left
                lost = left - min(life.recovered, left)
                unexplained += lost - min(life.unsealed, lost)
                recovered += min(life.recovered, left)
            known += life.known
            hits += life.hits
            corrupt += life.corrupt
    notes = driver.notes
    return {
        "rounds": rounds,
        "seed": seed,
        "seconds": round(time.monotonic() - begun_s, 1),
        "wrong": notes[Note.WRONG],
        "checked": notes[Note.CHECKED],
        "steps": notes[Note.STEPS],
        "resets": notes[Note.RESETS],
        "deletions": notes[Note.DELETIONS],
        "resizes": notes[Note.RESIZES],
        "deaths_at_start": deaths_at_start,
        "deaths_in_resizes": deaths_in_resizes,
        "hits": hits,
        "corrupt": corrupt,
        "ready_at_kill": ready,
        "recovered": recovered,
        "recovered_share": round(recovered / max(ready, 1), 4),
        "unexplained_share": round(unexplained / max(ready, 1), 4),
        "with_row": known,
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
