"""The values that keywords of JSON Schema take: checked, and bounded to what is enforced."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

from mlxd_worker.constraints.patterns import (
    PatternError,
    is_unwritable,
    search_pattern,
    whole_pattern,
)
from mlxd_worker.constraints.schema_places import Json, Place
from mlxd_worker.constraints.string_formats import LIBRARY_FORMATS, REFUSED_FORMATS, STRING_FORMATS

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
EXACT_INTEGER_MAX: Final = 1 << 53
"""The library reckons in doubles: every integer up to here is one. Bounds beyond become this."""
ITEMS_MAX: Final = 10_000
"""What minItems and maxItems may say; the library makes something for each item."""
COUNT_MAX: Final = 1 << 31
MULTIPLE_MAX: Final = 1_000
"""What multipleOf may be, its decimal point left out: each remainder is a state."""
MULTIPLE_PLACES_MAX: Final = 9

INTEGER_FORMATS: Final = {"int32": 1 << 31, "int64": 1 << 63}


def types(place: Place, keyword: str, value: Json) -> list[str]:
    """Return the names of types, each once."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        place.refuse("a type's name, or a list of such, is needed", keyword)
    for name in names:
        if name not in TYPES:
            place.refuse(f"{str(name)[:40]!r} is not a type", keyword)
    return list(dict.fromkeys(names))


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


def bound_of(place: Place, keyword: str, value: Json, *, least: bool) -> int | float:
    """Return a lower or an upper bound of numbers, none wider than what is served."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.refuse("a number is needed", keyword)
    if (value > EXACT_INTEGER_MAX) if least else (value < -EXACT_INTEGER_MAX):
        place.refuse(f"nothing beyond {EXACT_INTEGER_MAX} is served", keyword)
    return max(value, -EXACT_INTEGER_MAX) if least else min(value, EXACT_INTEGER_MAX)


def multiple(place: Place, keyword: str, value: Json) -> int | float:
    """Return what numbers are to be multiples of; it may meet every other one of the schema."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        place.refuse("a number above 0 is needed", keyword)
    exact = Fraction(repr(value))
    for number in (exact, place.document.common_multiple(exact)):
        if not _is_served_multiple(number):
            beside = "" if number == exact else f" beside others, which makes {float(number)},"
            most = f"{MULTIPLE_MAX} without its point, {MULTIPLE_PLACES_MAX} places behind it"
            place.refuse(f"{value}{beside} is beyond what is served: {most}", keyword)
    return value


def _is_served_multiple(value: Fraction) -> bool:
    """Whether the library reckons with a number: it has a state for each remainder."""
    digits = range(MULTIPLE_PLACES_MAX + 1)
    places = next((n for n in digits if (value * 10**n).denominator == 1), None)
    return places is not None and value * 10**places <= MULTIPLE_MAX


def pattern(place: Place, value: Json) -> str:
    """Return an expression that is found in the same strings, for the library."""
    if not isinstance(value, str):
        place.refuse("an expression is a text")
    try:
        return search_pattern(value)
    except PatternError as error:
        place.refuse(str(error))


def format_demand(place: Place, keyword: str, value: Json) -> dict[str, Any]:
    """Return what a format demands of strings and integers; nothing where no draft knows it."""
    if not isinstance(value, str):
        place.refuse("a format's name is needed", keyword)
    if value in REFUSED_FORMATS:
        place.refuse(f"the format {value[:80]!r} is not served", keyword)
    kinds = types(place, "type", place.content.get("type", "number"))
    if value in INTEGER_FORMATS and "integer" in kinds and "number" not in kinds:
        limit = min(INTEGER_FORMATS[value], EXACT_INTEGER_MAX)
        return {"minimum": -limit, "maximum": limit - 1}
    if value in LIBRARY_FORMATS:
        return {"format": value}
    if value not in STRING_FORMATS:
        return {}
    known = STRING_FORMATS[value]
    demand: dict[str, Any] = {"pattern": f"^{whole_pattern(known.pattern)}$"}
    return demand if known.chars_max is None else demand | {"maxLength": known.chars_max}


def check_exact(place: Place, value: Json, keyword: str) -> None:
    """Refuse a constant that holds a number or a text which is not written exactly."""
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
        elif isinstance(at, str) and any(is_unwritable(ord(char)) for char in at):
            place.refuse("a text with a control character, which no output has", keyword)
