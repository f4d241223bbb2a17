"""JSON that is passed on as text."""

from __future__ import annotations

import msgspec
import pytest

from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.texts import join_objects

UNREADABLE = (b'{"b": 1e999}', b'{"b": "\\q"}', b"[1]", b"[" * 10_000 + b"]" * 10_000)


@pytest.mark.parametrize("sent", UNREADABLE, ids=["number", "escape", "list", "deep"])
def test_what_cannot_be_joined_is_refused(sent: bytes) -> None:
    """A client's object is read only where something of ours joins it; the field is named."""
    with pytest.raises(BadField) as caught:
        join_objects({"a": 1}, msgspec.Raw(sent), "field")
    assert caught.value.failure.field == "field"
