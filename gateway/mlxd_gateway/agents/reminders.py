"""Texts in the marks that agents put around what the application says in between. Pure."""

from __future__ import annotations

BEGIN, END = "<system-reminder>", "</system-reminder>"


def remind(text: str) -> str:
    """Return a text within the marks; one that is within them already as it is."""
    return text if is_reminder(text) else f"{BEGIN}\n{text}\n{END}"


def is_reminder(text: str) -> bool:
    """Return whether a text is reminders and nothing else; takes time in proportion to it."""
    position = 0
    while True:
        while text[position : position + 1].isspace():
            position += 1
        if position == len(text):
            return bool(text) and not text.isspace()
        if not text.startswith(BEGIN, position):
            return False
        end = text.find(END, position)
        if end < 0:
            return False
        position = end + len(END)


def join(*texts: str) -> str:
    """Return texts one below the other; empty ones leave nothing."""
    return "\n\n".join(text for text in texts if text)
