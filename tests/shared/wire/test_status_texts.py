"""What an error's texts become on their way into a status."""

from __future__ import annotations

import pytest

from mlxd_shared.domain import errors
from mlxd_shared.wire.status import shorten, to_status


def test_a_text_that_cannot_be_sent_is_sent_escaped() -> None:
    """Half a surrogate pair in a client's words is no reason for another error."""
    status = to_status(errors.InvalidRequest.of("text", "a \ud800 b"))
    assert "a \\ud800 b" in status.message


@pytest.mark.parametrize(
    ("text", "nbytes", "shortened"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abc…"),
        ("äöü", 6, "äöü"),
        ("äöüa", 6, "ä…"),
        ("", 6, ""),
        ("\ud800", 6, "\\ud800"),
    ],
)
def test_a_text_is_cut_where_it_is_too_long_alone(text: str, nbytes: int, shortened: str) -> None:
    """What fits is left as it is; of a character nothing is left or all of it."""
    assert shorten(text, nbytes) == shortened
