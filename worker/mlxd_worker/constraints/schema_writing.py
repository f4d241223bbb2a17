"""Schemas made of others, for what is read once more."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from mlxd_worker.constraints.schema_facts import FRACTION, KINDS, NUMBERS
from mlxd_worker.constraints.schema_places import Json


def of_kinds(kinds: frozenset[str] | set[str]) -> list[Json]:
    """Return the schema of values of some kinds; nothing where there are none."""
    types = sorted(kinds & (KINDS - NUMBERS))
    if FRACTION in kinds:
        types.append("number")
    elif "integer" in kinds:
        types.append("integer")
    return [{"type": types}] if types else []


def between(numbers: list[Json], kind: str) -> list[Json]:
    """Return the numbers between some, and beyond them."""
    edges = [None, *sorted(set(numbers)), None]
    found: list[Json] = []
    for low, high in pairwise(edges):
        way = {"type": [kind]}
        way |= {} if low is None else {"exclusiveMinimum": low}
        found.append(way | ({} if high is None else {"exclusiveMaximum": high}))
    return found


def one_of(options: list[Json]) -> Json:
    """Return the schema of some constants."""
    return {"enum": options} if options else False


def any_of(ways: Iterable[Json]) -> Json:
    """Return the schema of what matches one of some; false where there are none."""
    left = [way for way in ways if way is not False]
    if any(way is True for way in left):
        return True
    return left[0] if len(left) == 1 else {"anyOf": left} if left else False


def all_of(demands: Iterable[Json]) -> Json:
    """Return the schema of what matches all of some; true where there are none."""
    left = [demand for demand in demands if demand is not True]
    if any(demand is False for demand in left):
        return False
    return left[0] if len(left) == 1 else {"allOf": left} if left else True
