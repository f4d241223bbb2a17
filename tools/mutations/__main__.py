"""Mutate lines drawn at random, and fail where the tests of their own room see too few."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from mutations.copies import ROOT
from mutations.report import SHARE_MIN, share, words
from mutations.session import mutate

KEPT = ROOT / "build" / "mutations"


def main() -> int:
    """Run the command line; return 1 where too few mutants were seen."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="lines to mutate")
    parser.add_argument("--seed", type=int, help="draws the same lines again; default: a new one")
    parser.add_argument("--processes", type=int, default=2, help="test processes at a time")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where a run is taken up again")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"{arguments.count} lines, --seed {seed}", flush=True)
    records = mutate(
        ROOT,
        count=arguments.count,
        seed=seed,
        processes=arguments.processes,
        kept=arguments.kept,
    )
    print(words(records, seed=seed))
    return int(share(records) < SHARE_MIN)


if __name__ == "__main__":
    sys.exit(main())
