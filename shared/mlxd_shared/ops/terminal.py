"""Texts of others on a terminal: whatever they hold, they do not steer it.

Names in a model's files, what a model says and what a worker printed come from strangers. Control
characters (C0 but line ends and tabs, DEL, C1) begin the sequences that move cursors, set titles
and answer for the keyboard.
"""

from __future__ import annotations

import re

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def without_steering(text: str) -> str:
    """Return a text less what would steer a terminal; for what is read as it streams."""
    return _STEERING.sub("", text)


def escape(text: str) -> str:
    r"""Return a text in which what would steer a terminal stands as its escape, such as \x1b."""
    return _STEERING.sub(_escape, text)


def escape_line(text: str) -> str:
    """Return the same as one line: line ends and tabs stand as their escapes too."""
    return _CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"
