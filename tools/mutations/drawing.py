"""Draw lines at random over all source, each as likely as any other, and one mutant of each."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from mutations.places import Mutant, Places, sources


def draw(root: Path, *, count: int, seed: int) -> list[Mutant]:
    """Return a mutant for each of `count` lines; the same ones for the same tree and seed.

    Fewer come back where the tree has fewer lines that can be mutated.
    """
    by_source = {
        name: Places(name, (root / name).read_text(encoding="utf-8")) for name in sources(root)
    }
    lines = [(name, line) for name, places in by_source.items() for line in places.lines]
    chance = random.Random(seed)
    chance.shuffle(lines)
    drawn: list[Mutant] = []
    for name, line in lines:
        if len(drawn) == count:
            break
        places = by_source[name]
        changes = chance.sample(range(places.count(line)), places.count(line))
        mutants = (places.mutant(line, index) for index in changes)
        drawn += itertools.islice((mutant for mutant in mutants if mutant is not None), 1)
    return drawn
