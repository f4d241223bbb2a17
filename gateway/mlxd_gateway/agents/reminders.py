"""Texts in the marks that agents put around what the application says in between. Pure."""

from __future__ import annotations

import re

BEGIN, END = "<system-reminder>", "</system-reminder>"
_WORD = re.compile(r"\S")


def remind(text: str) -> str:
    """Return a text within the marks; one that is within them already as it is."""
    return text if is_reminder(text) else f"{BEGIN}\n{text}\n{END}"


def is_reminder(text: str) -> bool:
    """Return whether a text is reminders and nothing else; takes time in proportion to it."""
    position = 0
    while (word := _WORD.search(text, position)) is not None:
        end = text.find(END, word.start())
        if end < 0 or not text.startswith(BEGIN, word.start()):
            return False
        position = end + len(END)
    return position > 0


def join(*texts: str) -> str:
    """Return texts one below the other; empty ones leave nothing."""
    return "\n\n".join(text for text in texts if text)
