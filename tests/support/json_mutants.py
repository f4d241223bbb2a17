"""Values of JSON that are nearly like another one: one place in them is changed."""

from __future__ import annotations

import copy
import random
from typing import Any, Final

OTHERS: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1.5, 10_000_000, "", "x", '"', "\\", "a b", [], {}, [None], {"x": 1},
)  # fmt: skip
NAMES: Final = ("x", "", "type", "name", "\u00e9")


def mutant(value: Any, rng: random.Random) -> Any:
    """Return a copy that differs in one place: another value, one more, one less, or longer."""
    result = [copy.deepcopy(value)]
    places: list[tuple[Any, Any]] = []
    todo: list[tuple[Any, Any]] = [(result, 0)]
    while todo:
        holder, key = todo.pop()
        places.append((holder, key))
        inner = holder[key]
        if isinstance(inner, dict):
            todo += [(inner, name) for name in inner]
        elif isinstance(inner, list):
            todo += [(inner, index) for index in range(len(inner))]
    holder, key = rng.choice(places)
    _change(holder, key, rng)
    return result[0]


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    at = holder[key]
    match rng.randrange(4):
        case 0 if isinstance(at, dict):
            at[rng.choice(NAMES)] = rng.choice(OTHERS)
        case 1 if isinstance(at, dict) and at:
            del at[rng.choice(list(at))]
        case 0 if isinstance(at, list):
            at.append(rng.choice([*at, *OTHERS]))
        case 1 if isinstance(at, list) and at:
            del at[rng.randrange(len(at))]
        case 0 | 1 if isinstance(at, str):
            place = rng.randrange(len(at) + 1)
            holder[key] = at[:place] + rng.choice(["x", '"', "\\", "\n", "-", "0"]) + at[place:]
        case 2 if isinstance(at, int | float) and not isinstance(at, bool):
            holder[key] = rng.choice([-at, at + 1, at * 1000, at / 7, at + 0.5])
        case _:
            holder[key] = rng.choice(OTHERS)
