"""Names that are no model's own: what somebody may have meant, and digests cut short. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

DIGEST_CHARS_MIN = 12
"""Of a digest, so many hexadecimal digits are a name: as many as `mlxd ps` shows."""
KNOWN_IN_HINT_MAX = 8
NEAR_IN_HINT_MAX = 3

WILD = "*"
"""Ends a pattern, which means every name that begins as it does."""

_DIGEST = re.compile(rf"(?:sha256:)?([0-9a-f]{{{DIGEST_CHARS_MIN},64}})")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?", re.ASCII)


def beginning_of_digest(name: str) -> str | None:
    """Return the digits with which a digest begins that a name stands for; None if for none.

    A digest may be cut short to DIGEST_CHARS_MIN digits, and stand behind its kind, `sha256:`.
    """
    match = _DIGEST.fullmatch(name)
    return None if match is None else match[1]


def is_repository(name: str) -> bool:
    """Return whether a name looks like ORG/NAME or ORG/NAME@REVISION, as a hub has them."""
    return _REPOSITORY.fullmatch(name) is not None


def is_pattern(text: str) -> bool:
    """Return whether a text is meant as a pattern; whether it is a good one is another matter."""
    return WILD in text


def match_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the longest of the patterns that mean a name; None: none does.

    Clients of Ollama's API add `:latest`, and ask for the name without it next: until then no
    pattern goes before a model that has that name.
    """
    if name.endswith(":latest"):
        return None
    matches = [
        text for text in patterns if text.endswith(WILD) and name.startswith(text[: -len(WILD)])
    ]
    return max(matches, key=len, default=None)


def hint_for(name: str, known: Iterable[str], *, pulls: bool) -> str:
    """Return what to tell somebody who named a model that is not there.

    known: every name that there is. pulls: whether there is a cache to pull models into.
    """
    names = sorted(known)
    near = _near(name, names)
    hints = []
    if near:
        hints.append(f"did you mean {' or '.join(near)}?")
    elif names:
        hints.append(f"known: {', '.join(names[:KNOWN_IN_HINT_MAX])}")
    else:
        hints.append("none is configured")
    if pulls and is_repository(name):
        hints.append(f"`mlxd pull {name}` downloads it from Hugging Face")
    return "; ".join(hints)


def _near(name: str, names: list[str]) -> list[str]:
    """Return the names that resemble one, whatever the case: those that contain it, then others."""
    wanted = name.casefold()
    by_folded = {other.casefold(): other for other in names}
    containing = [other for other in by_folded if wanted and wanted in other]
    resembling = difflib.get_close_matches(wanted, by_folded, n=NEAR_IN_HINT_MAX)
    near = dict.fromkeys([*containing, *resembling])
    return [by_folded[other] for other in near][:NEAR_IN_HINT_MAX]
