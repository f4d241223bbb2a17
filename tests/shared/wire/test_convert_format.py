"""Formats on the wire: what each kind's field is, and what is out of bounds, by that name."""

from __future__ import annotations

import pytest

from mlxd_shared import config
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.wire.convert_format import (
    format_from_pb,
    format_texts,
    format_to_pb,
    format_violations,
)

CHOICES = "response_format.choice.choices"
MOST = config.FORMAT_CHOICES_MAX
LONGEST = "a" * config.FORMAT_CHARS_MAX


def choosing(*choices: str) -> ResponseFormat:
    """Return a format of these texts."""
    return ResponseFormat(FormatKind.CHOICE, choices=choices)


def make_format(kind: FormatKind, text: str) -> ResponseFormat:
    """Return a format of another kind."""
    return ResponseFormat(kind, text)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (choosing(), CHOICES),
        (choosing(*["a"] * (MOST + 1)), CHOICES),
        (choosing("a", ""), CHOICES),
        (choosing(LONGEST, "a"), CHOICES),
        (make_format(FormatKind.REGEX, ""), "response_format.regex"),
        (make_format(FormatKind.JSON_SCHEMA, LONGEST + "a"), "response_format.json_schema"),
        (make_format(FormatKind.EBNF_GRAMMAR, ""), "response_format.ebnf_grammar"),
        (choosing(*["a"] * MOST), None),
        (choosing("a"), None),
        (choosing(LONGEST), None),
        (make_format(FormatKind.REGEX, LONGEST), None),
        (make_format(FormatKind.JSON_OBJECT, ""), None),
    ],
)
def test_bounds_are_refused_by_field(wanted: ResponseFormat, field: str | None) -> None:
    """One of each bound and one beyond it; what is good comes back as it was sent."""
    pb = format_to_pb(wanted)

    assert [violation.field for violation in format_violations(pb)] == (
        [] if field is None else [field]
    )
    assert format_from_pb(pb) == wanted


def test_texts_come_behind_their_field() -> None:
    """As many as there are; an object has none, nor has no format."""
    assert format_texts(choosing("a", "b")) == (CHOICES, "a", "b")
    assert format_texts(make_format(FormatKind.REGEX, "a")) == ("response_format.regex", "a")
    assert format_texts(ResponseFormat(FormatKind.JSON_OBJECT, "a")) == ("response_format",)
    assert format_texts(None) == ("response_format",)
