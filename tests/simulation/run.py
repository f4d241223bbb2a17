"""Run seeds: `python -m tests.simulation.run FIRST LAST` says which seed fails, and how.

Exit status 1 and one line for the first failure; with one seed, its whole traceback.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.simulation.world import World


class SeedFailed(AssertionError):
    """A history in which something did not hold; the seed replays it."""


def run_seeds(first: int, last: int) -> Counter[str]:
    """Live through the seeds of a range; return how often each hard state came up.

    Raises:
        SeedFailed: with the seed, from the Violation or the core's own assertion.
    """
    seen: Counter[str] = Counter()
    for seed in range(first, last):
        world = World(seed)
        try:
            seen += world.run()
        except Exception as error:
            description = f"{type(error).__name__}: {error}"
            raise SeedFailed(f"seed {seed}, event {world.sent}: {description}") from error
        seen["events"] += world.sent
    return seen


def main() -> int:
    """Run the range given on the command line."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    if last == first + 1:
        World(first).run()
        return 0
    try:
        seen = run_seeds(first, last)
    except SeedFailed as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{count:9} {name}\n" for name, count in sorted(seen.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
