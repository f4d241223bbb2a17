"""Lines that agents write at the head of a prompt and change: exact forms, a line each. Pure.

A line that has anything else in it is no such line, and stays where it is.
"""

from __future__ import annotations

import itertools
import re

HEAD_CHARS_MAX = 1 << 18
"""In a longer head nothing is looked for, so that no request takes others' time."""
_BLANKS = "[ \t]*"
_DATE = (
    r"(?:\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}"
    r"|(?:[A-Z][a-z]{2,8},? )?[A-Z][a-z]{2,8} \d{1,2},? \d{4})"
)
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:\.\d{1,9})?)?(?: ?[AP]M)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"


def _line(form: str) -> re.Pattern[str]:
    return re.compile(rf"^{_BLANKS}{form}{_BLANKS}$", re.MULTILINE)


BILLING = _line(r"x-anthropic-billing-header:(?: \w{1,64}=[^;\s]{0,256};){1,16}")
DATE = _line(rf"(?:- )?(?:Today's date|Current date|The current date)(?::| is) {_DATE}\.?")
CLOCK = _line(
    r"(?:- )?(?:Current time|Current date and time|The current time|The current date and time)"
    rf"(?::| is) (?:{_DATE}[ T,]{{1,2}})?{_TIME}\.?"
)
TOKENS_LEFT = _line(r"<total_tokens>\d{1,12} tokens left</total_tokens>")


def take_lines(text: str, form: re.Pattern[str]) -> tuple[str, tuple[str, ...]]:
    """Return a text without the lines of a form, and these lines in their order."""
    if form.search(text) is None:
        return text, ()
    lines = text.split("\n")
    taken = tuple(line.strip() for line in lines if form.fullmatch(line))
    return "\n".join(line for line in lines if not form.fullmatch(line)), taken


def drop_first_lines(text: str, form: re.Pattern[str]) -> str:
    """Return a text without those of its first lines that are of a form."""
    return "\n".join(itertools.dropwhile(form.fullmatch, text.split("\n")))
