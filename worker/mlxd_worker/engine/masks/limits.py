"""What the library may spend on one constraint, and how it tells that it would spend more."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

REASON_CHARS_MAX: Final = 300

HEADER: Final = '%llguidance {"no_forcing": true}\n'
"""Before each source. Every token that fits is allowed, not only the tokenizer's own choice."""

JSON_START: Final = "start: %json "
"""How the library's notation of a JSON schema begins, after the header."""

CALLS_START: Final = "// calls of tools\n"
"""How our own grammars of calls begin, after the header: what is not JSON in them is read in one
way."""

JSON_ITEMS_MAX: Final = 2_000
"""Of the parser at one place: four for each member that an object may have or not."""

GRAMMAR_ITEMS_MAX: Final = 500
"""Less for a grammar, which may be read in many ways at a time: then a token takes up to their
third power."""


def limits_of(source: str) -> LLParserLimits:
    """Return what the library may spend on a constraint in its notation."""
    is_json = source.startswith((HEADER + JSON_START, HEADER + CALLS_START))
    return LLParserLimits(
        max_items_in_row=JSON_ITEMS_MAX if is_json else GRAMMAR_ITEMS_MAX,
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # of some 0.5 kB each, which all rows of a constraint share
        max_grammar_size=500_000,
        verbose_errors=False,
    )


_BEYOND: Final = ("limit", "max is", "too big", "too large", "too many", "too complex")
_FULL: Final = "too many states"
_PANIC: Final = "panic: "
_DEAD_END: Final = "NoExtension"


def is_beyond_limits(message: str) -> bool:
    """Tell whether the library gave up because of its limits, and not because of a fault."""
    lowered = message.lower()
    return any(sign in lowered for sign in _BEYOND)


def is_full(message: str) -> bool:
    """Tell whether the rows of a constraint have met as many states as are kept for them all."""
    return _FULL in message


def reason(message: str) -> str:
    """Return the library's reason, without the grammar that we gave it."""
    if message.startswith(_PANIC):  # of its sizes, none of which is the user's
        return "takes more than the library can count"
    if message.startswith(_DEAD_END):
        return "no text matches it"
    before, _, behind = message.partition("\n")[0].partition("failed to compile JSON schema: ")
    return (behind or before)[:REASON_CHARS_MAX]
