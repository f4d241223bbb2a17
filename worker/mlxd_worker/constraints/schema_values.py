"""The values that keywords of JSON Schema take: checked, and bounded to what is enforced."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Final

from mlxd_worker.constraints.pattern_reader import PatternError
from mlxd_worker.constraints.patterns import name_pattern, search_pattern, whole_pattern
from mlxd_worker.constraints.schema_places import Json, Place
from mlxd_worker.constraints.string_formats import STRING_FORMATS

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
EXACT_INTEGER_MAX: Final = 1 << 53
"""The library reckons in doubles: every integer up to here is one."""
BOUND_MAX: Final = (1 << 63) - 1
BOUND_MIN: Final = -(1 << 63) + 1024
"""The library counts bounds in 64 bits: the least double whose negative is such a number."""
FRACTION_BOUND_MAX: Final = -BOUND_MIN
"""The most for numbers with fractions, which the library bounds in doubles."""
ITEMS_MAX: Final = 10_000
"""What minItems and maxItems may say; the library makes something for each item."""
COUNT_MAX: Final = 1 << 31
MULTIPLE_MAX: Final = 1_000
"""What multipleOf may be, its decimal point left out: each remainder is a state."""
MULTIPLE_PLACES_MAX: Final = 9

INTEGER_FORMATS: Final = {"int32": 1 << 31, "int64": 1 << 63}
KNOWN_FORMATS: Final = frozenset(STRING_FORMATS) | {
    "idn-email", "idn-hostname", "regex", "uri-template",
}  # fmt: skip
"""The formats of strings that some draft defines; any other name is an annotation."""


class WrittenPattern(str):
    """An expression for whole texts in the library's notation, which no schema holds by itself."""

    __slots__ = ()


def types(place: Place, keyword: str, value: Json) -> list[str]:
    """Return the names of types, each once."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        place.refuse("a type's name, or a list of such, is needed", keyword)
    for name in found:
        if name not in TYPES:
            place.refuse(f"{str(name)[:40]!r} is no type", keyword)
    return list(dict.fromkeys(found))


def names(place: Place, keyword: str, value: Json) -> list[str]:
    """Return the names of members, each once."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        place.refuse("a list of names is needed", keyword)
    return list(dict.fromkeys(value))


def count(place: Place, keyword: str, value: Json) -> int:
    """Return a number of things; 2.0 is 2."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        place.refuse("a whole number is needed", keyword)
    if not 0 <= value <= COUNT_MAX:
        place.refuse(f"{value} is outside [0, {COUNT_MAX}]", keyword)
    return int(value)


def bound(
    place: Place,
    keyword: str,
    value: Json,
    *,
    least: bool,
) -> int | float:
    """Return a lower or an upper bound of numbers, none wider than what is served."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.refuse("a number is needed", keyword)
    if (value > BOUND_MAX) if least else (value < BOUND_MIN):
        place.refuse(f"nothing beyond {BOUND_MAX if least else BOUND_MIN} is served", keyword)
    most = BOUND_MAX if place.content.get("type") == "integer" else FRACTION_BOUND_MAX
    served = max(value, BOUND_MIN) if least else min(value, most)
    # A double of that size is whole; the library reads its shortest spelling as another one.
    return int(served) if abs(served) > EXACT_INTEGER_MAX else served


def multiple(place: Place, keyword: str, value: Json) -> int | float:
    """Return what numbers are to be multiples of; it may meet every other one of the schema."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        place.refuse("a number above 0 is needed", keyword)
    exact = Fraction(repr(value))
    for other in {exact} | place.document.multiples:
        if not _is_served_multiple(_least_common(exact, other)):
            beside = "" if other == exact else f" beside {float(other)}"
            most = (
                f"{MULTIPLE_MAX} without its decimal point, {MULTIPLE_PLACES_MAX} places behind it"
            )
            place.refuse(f"{value}{beside} is beyond what is served: {most}", keyword)
    place.document.multiples.add(exact)
    return value


def multiples(place: Place, keyword: str, value: Json) -> list[int | float]:
    """Return what numbers are to be multiples of, and the same for those with fewer decimals."""
    found: list[int | float] = [multiple(place, keyword, value)]
    exact = Fraction(repr(value))
    for places in range(_decimals(exact) or 0):
        whole = _least_common(exact, Fraction(1, 10**places))
        form = int(whole) if whole.denominator == 1 else float(whole)
        if form not in found and places:
            found.append(multiple(place, keyword, form))
    return found


def _decimals(value: Fraction) -> int | None:
    """Return how many places behind the point a number takes; None where it takes too many."""
    digits = range(MULTIPLE_PLACES_MAX + 1)
    return next((n for n in digits if (value * 10**n).denominator == 1), None)


def _least_common(first: Fraction, second: Fraction) -> Fraction:
    """Return the least number that both divide."""
    numerator = math.lcm(first.numerator * second.denominator, second.numerator * first.denominator)
    return Fraction(numerator, first.denominator * second.denominator)


def _is_served_multiple(value: Fraction) -> bool:
    """Whether the library reckons with a number: it has a state for each remainder."""
    places = _decimals(value)
    return places is not None and value * 10**places <= MULTIPLE_MAX


def pattern(place: Place, value: str, *, exact: bool = False) -> str:
    """Return an expression that is found in the same texts, for the library.

    exact: whether texts that it does not match mean something, too.
    """
    if isinstance(value, WrittenPattern):
        return f"^(?:{value})$"
    try:
        return f"^(?:{(name_pattern if exact else search_pattern)(value)})$"
    except PatternError as error:
        place.refuse(str(error))


def format_demands(
    place: Place,
    keyword: str,
    value: Json,
    *,
    types: Iterable[str],
) -> list[dict[str, Any]]:
    """Return what a format demands of values of some types; it concerns strings and integers."""
    if not isinstance(value, str):
        place.refuse("a format's name is needed", keyword)
    found: list[dict[str, Any]] = []
    wanted = set(types)
    if "integer" in wanted and "number" not in wanted and value in INTEGER_FORMATS:
        limit = INTEGER_FORMATS[value]
        found.append({"minimum": max(-limit, BOUND_MIN), "maximum": limit - 1})
    if "string" in wanted and value in KNOWN_FORMATS:
        known = STRING_FORMATS.get(value)
        if known is None:
            place.refuse(f"the format {value[:80]!r} is not served", keyword)
        demand: dict[str, Any] = {"pattern": f"^(?:{whole_pattern(known.pattern)})$"}
        if known.chars_max is not None:
            demand["maxLength"] = known.chars_max
        found.append(demand)
    return found


def check_exact(place: Place, value: Json, keyword: str) -> None:
    """Refuse a constant that holds a number which is not written exactly."""
    todo = [value]
    while todo:
        at = todo.pop()
        if isinstance(at, dict):
            todo += at.values()
        elif isinstance(at, list):
            todo += at
        elif isinstance(at, int) and abs(at) > EXACT_INTEGER_MAX:
            place.refuse(f"{at} is beyond {EXACT_INTEGER_MAX}, up to where they are exact", keyword)
        elif isinstance(at, float) and not math.isfinite(at):
            place.refuse("a number that is infinite", keyword)
