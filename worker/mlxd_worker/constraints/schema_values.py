"""The values that keywords of JSON Schema take: checked, and bounded to what is enforced.

Of the formats of strings ours are those of which the library takes more, such as 30 February:
expressions for a text as a whole, in the syntax that `patterns` reads.

Invariants:
- What the expressions of a format match is of the format, also where that is a matter of the
  calendar: 29 February in leap years alone, a leap second at the end of a day of UTC alone.
- What is of the format and rare may be missing: a leap second in another time zone, a quoted local
  part of an e-mail address, an IPv6 address that ends like one of IPv4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from mlxd_worker.constraints.patterns import (
    PatternError,
    is_unwritable,
    search_pattern,
    whole_pattern,
)
from mlxd_worker.constraints.schema_places import Json, Place

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


@dataclass(frozen=True, slots=True)
class StringFormat:
    """One format: an expression for whole texts, and the most characters of one."""

    pattern: str
    chars_max: int | None = None


# The year 0 is left out: RFC 3339 has it, and most calendars of programming languages do not.
_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+\-]00:00))"
)
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_ALNUM: Final = "[a-zA-Z0-9]"
_INNER: Final = r"[a-zA-Z0-9\-]"
# At most 63, and no hyphens in the third and fourth place: those are for encoded names.
_LABEL: Final = (
    f"(?:{_ALNUM}(?:{_INNER}?{_ALNUM})?|{_ALNUM}{_INNER}(?:{_ALNUM}{_ALNUM}|-{_ALNUM})"
    f"|{_ALNUM}{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})"
)
_HOSTNAME: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_HOSTNAME_CHARS_MAX: Final = 253
_ATEXT: Final = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]"
_EMAIL: Final = rf"{_ATEXT}+(?:\.{_ATEXT}+)*@(?:{_HOSTNAME}|\[{_IPV4}\])"

STRING_FORMATS: Final = {
    "date": StringFormat(_DATE),
    "time": StringFormat(_TIME),
    "date-time": StringFormat(f"{_DATE}[tT]{_TIME}"),
    "email": StringFormat(_EMAIL),
    "hostname": StringFormat(_HOSTNAME, _HOSTNAME_CHARS_MAX),
}
LIBRARY_FORMATS: Final = ("duration", "ipv4", "ipv6", "uri", "uuid")
"""Those that the library reads as they are defined."""
REFUSED_FORMATS: Final = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
    "relative-json-pointer", "uri-reference", "uri-template",
)  # fmt: skip
"""The others that some draft defines; any other name is an annotation."""


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


def items_count(place: Place, keyword: str, value: Json) -> int:
    """Return a number of items, no more than are served."""
    items = count(place, keyword, value)
    if items > ITEMS_MAX:
        place.refuse(f"{items} is above {ITEMS_MAX}, the most served", keyword)
    return items


def at_least_one(place: Place, keyword: str, value: Json) -> list[Json]:
    """Return a list that is not empty."""
    if not isinstance(value, list) or not value:
        place.refuse("a list of at least one value is needed", keyword)
    return value


def bound_of(place: Place, keyword: str, value: Json) -> int | float:
    """Return a lower or an upper bound of numbers, none wider than what is served."""
    least = keyword.endswith("inimum")
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


def pattern(place: Place, keyword: str, value: Json) -> str:
    """Return an expression that is found in the same strings, for the library."""
    return pattern_at(place.inner(value, keyword), value)


def pattern_at(place: Place, value: Json) -> str:
    """Return the same of one that stands at a place."""
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


def constants(place: Place, keyword: str, value: Json) -> list[Json]:
    """Return a list of constants."""
    return [constant(place, keyword, item) for item in at_least_one(place, keyword, value)]


def constant(place: Place, keyword: str, value: Json) -> Json:
    """Return a constant; one that holds a number or a text is refused if not written exactly."""
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
    return value
