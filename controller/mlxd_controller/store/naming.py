"""Near misses of names, patterns, and shortened digests. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from mlxd_shared.domain.errors import InvalidRequest

_T = TypeVar("_T")

DIGEST_CHARS_MIN = 12
"""A digest may be shortened to this many hexadecimal digits: as many as `mlxd ps` shows."""
KNOWN_IN_HINT_MAX = 8
NEAR_IN_HINT_MAX = 3

WILD = "*"
"""Ends a pattern, which stands for every name with that beginning."""

_DIGEST = re.compile(rf"(?:sha256:)?([0-9a-f]{{{DIGEST_CHARS_MIN},64}})")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?", re.ASCII)


def beginning_of_digest(name: str) -> str | None:
    """Return the first digits of a digest if the name stands for one, else None.

    A digest may be shortened to DIGEST_CHARS_MIN digits, and be preceded by `sha256:`.
    """
    match = _DIGEST.fullmatch(name)
    return None if match is None else match[1]


def only_match(name: str, by_digest: Mapping[str, _T]) -> _T | None:
    """Return the one thing whose digest begins as a name says; None where there is none.

    Raises:
        InvalidRequest: the name is too short to tell several apart.
    """
    beginning = beginning_of_digest(name)
    if beginning is None:
        return None
    matches = [each for digest, each in by_digest.items() if digest.startswith(beginning)]
    if len(matches) > 1:
        problem = f"the digests of {len(matches)} models begin with {name}: write more of one"
        raise InvalidRequest.of("model", problem)
    return matches[0] if matches else None


def is_repository(name: str) -> bool:
    """Return whether a name looks like ORG/NAME or ORG/NAME@REVISION on a hub."""
    return _REPOSITORY.fullmatch(name) is not None


def is_pattern(text: str) -> bool:
    """Return whether a text is meant as a pattern, valid or not."""
    return WILD in text


def match_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the longest pattern that matches a name, if any.

    Clients of Ollama's API append `:latest`, and then ask for the name without it: a pattern must
    not precede a model with that name.
    """
    if name.endswith(":latest"):
        return None
    matches = [
        text for text in patterns if text.endswith(WILD) and name.startswith(text[: -len(WILD)])
    ]
    return max(matches, key=len, default=None)


def hint_for(name: str, known: Iterable[str], *, pulls: bool) -> str:
    """Return a hint for a request that named an unknown model.

    known: all existing names. pulls: whether there is a cache to pull models into.
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
    """Return similar names, ignoring case: those that contain `name`, then others."""
    wanted = name.casefold()
    by_folded = {other.casefold(): other for other in names}
    containing = [other for other in by_folded if wanted and wanted in other]
    resembling = difflib.get_close_matches(wanted, by_folded, n=NEAR_IN_HINT_MAX)
    near = dict.fromkeys([*containing, *resembling])
    return [by_folded[other] for other in near][:NEAR_IN_HINT_MAX]
