"""An engine of ECMA-262, to judge what our expressions mean."""

from __future__ import annotations

import regress


def finds(pattern: str, text: str) -> bool:
    """Tell whether an expression is found in a text; the flag `u` is for those that take it."""
    try:
        return regress.Regex(pattern, "u").find(text) is not None
    except regress.RegressError:
        return regress.Regex(pattern).find(text) is not None


def written_found(written: str, text: str) -> bool:
    """Tell whether an expression in the library's notation is found in a text."""
    return regress.Regex(written.replace(r"\x{", r"\u{"), "v").find(text) is not None


def written_matches(written: str, text: str) -> bool:
    """Tell whether an expression in the library's notation matches a text as a whole."""
    return written_found(f"^(?:{written})$", text)
