"""What an error's texts become on their way into a status."""

from __future__ import annotations

from mlxd_shared import errors
from mlxd_shared.status import to_status


def test_a_text_that_cannot_be_sent_is_sent_escaped() -> None:
    """Half a surrogate pair in a client's words is no reason for another error."""
    status = to_status(errors.InvalidRequest.of("text", "a \ud800 b"))
    assert "a \\ud800 b" in status.message
