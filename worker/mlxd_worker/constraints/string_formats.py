"""The formats of strings that JSON Schema defines: the library's own, ours, and what is refused.

Ours are those of which the library takes more, such as 30 February: expressions for a text as a
whole, in the syntax that `patterns` reads.

Invariants:
- What the expressions of a format match is of the format, also where that is a matter of the
  calendar: 29 February in leap years alone, a leap second at the end of a day of UTC alone.
- What is of the format and rare may be missing: a leap second in another time zone, a quoted local
  part of an e-mail address, an IPv6 address that ends like one of IPv4.
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
