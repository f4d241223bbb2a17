"""The formats of strings that JSON Schema defines, as expressions that match them exactly.

Each is written for a text as a whole, in the syntax that `pattern_reader` reads.

Invariants:
- What the expressions of a format match is of the format, also where that is a matter of the
  calendar: 29 February in leap years alone, a leap second at the end of a day of UTC alone.
- What is of the format and rare may be missing: a leap second in another time zone, a quoted local
  part of an e-mail address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
_DURATION_TIME: Final = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION: Final = (
    f"P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_DURATION_TIME})?"
    f"|{_DURATION_TIME}|[0-9]+W)"
)
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Return all groups written out, and the ways to leave a run of zeros out."""
    last = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
    ways = [f"(?:{_GROUP}:){{6}}{last}"]
    ways += [
        f"{_groups(before)}::(?:{_GROUP}:){{{after}}}{last}"
        for before in range(6)
        for after in range(6 - before)
    ]
    ways += [f"{_groups(before)}::{_GROUP}" for before in range(7)]
    ways += [f"{_groups(before)}::" for before in range(8)]
    return f"(?:{'|'.join(ways)})"


def _groups(count: int) -> str:
    return f"{_GROUP}(?::{_GROUP}){{{count - 1}}}" if count else ""


_IPV6: Final = _ipv6()
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
_UUID: Final = "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"


def _uri(other: str, *, relative: bool, private: str = "") -> str:
    """Return a URI, or with `relative` a reference.

    other: what may stand for itself beside ASCII, as members of a class; private: in a query only.
    """
    own = rf"a-zA-Z0-9\-._~!$&'()*+,;={other}"
    coded = "%[0-9a-fA-F]{2}"
    char = f"(?:[{own}:@]|{coded})"
    host = rf"(?:\[(?:{_IPV6}|[vV][0-9a-fA-F]+\.[{own}:]+)\]|(?:[{own}]|{coded})*)"
    authority = rf"//(?:(?:[{own}:]|{coded})*@)?{host}(?::[0-9]*)?"
    path = f"(?:/{char}*)*"
    tail = rf"(?:\?(?:[{own}:@/?{private}]|{coded})*)?(?:#(?:[{own}:@/?]|{coded})*)?"
    hierarchy = f"(?:{authority}{path}|/(?:{char}+{path})?|{char}+{path}|)"
    absolute = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{hierarchy}{tail}"
    if not relative:
        return absolute
    first = f"(?:[{own}@]|{coded})+"  # without a colon, which would end a scheme
    return f"(?:{absolute}|(?:{authority}{path}|/(?:{char}+{path})?|{first}{path}|){tail})"


_UCS: Final = (
    r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14))
    + r"\u{e1000}-\u{efffd}"
)
_PRIVATE: Final = r"\ue000-\uf8ff\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"
_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"

STRING_FORMATS: Final = {
    "date": StringFormat(_DATE),
    "time": StringFormat(_TIME),
    "date-time": StringFormat(f"{_DATE}[tT]{_TIME}"),
    "duration": StringFormat(_DURATION),
    "email": StringFormat(_EMAIL),
    "hostname": StringFormat(_HOSTNAME, _HOSTNAME_CHARS_MAX),
    "ipv4": StringFormat(_IPV4),
    "ipv6": StringFormat(_IPV6),
    "uuid": StringFormat(_UUID),
    "uri": StringFormat(_uri("", relative=False)),
    "uri-reference": StringFormat(_uri("", relative=True)),
    "iri": StringFormat(_uri(_UCS, relative=False, private=_PRIVATE)),
    "iri-reference": StringFormat(_uri(_UCS, relative=True, private=_PRIVATE)),
    "json-pointer": StringFormat(_POINTER),
    "relative-json-pointer": StringFormat(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
}
