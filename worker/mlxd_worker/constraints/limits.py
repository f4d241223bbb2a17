"""What the library may spend on one constraint, and how it tells that it would spend more."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

REASON_CHARS_MAX: Final = 300

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # of 1 to 2 kB each, and every row has its own
    max_grammar_size=500_000,
    verbose_errors=False,
)
_BEYOND: Final = ("limit", "max is", "too big", "too large", "too many", "too complex")
_PANIC: Final = "panic: "


def is_beyond_limits(message: str) -> bool:
    """Tell whether the library gave up because of `LIMITS`, and not because of a fault."""
    lowered = message.lower()
    return any(sign in lowered for sign in _BEYOND)


def reason(message: str) -> str:
    """Return the library's reason, without the grammar that we gave it."""
    if message.startswith(_PANIC):  # of its sizes, none of which is the user's
        return "takes more than the library can count"
    before, _, behind = message.partition("\n")[0].partition("failed to compile JSON schema: ")
    return (behind or before)[:REASON_CHARS_MAX]
