"""One seed's world for so many steps: `python -m tests.sim SEED STEPS`."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.sim.simulation import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int, help="which world")
    parser.add_argument("steps", type=int, help="for how many steps")
    parser.add_argument("--seeds", type=int, default=1, help="so many worlds, from this seed on")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    failed = 0
    for seed in range(options.seed, options.seed + options.seeds):
        report = simulate(seed, options.steps)
        failed += report.error is not None
        print(report)
        if options.seeds == 1 and report.error is None:
            print(report.outcome)
            for name, count in sorted(report.events.items()):
                print(f"  {count:7} {name}")
    return 1 if failed else 0


sys.exit(main())
