"""Fields that are not served are refused by their path from the request."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from mlxd.v1 import inference_pb2, model_pb2
from mlxd_shared.domain.errors import FieldNotServed
from mlxd_shared.wire.unserved import refuse_unserved


@pytest.mark.parametrize("prefix", ["", "load.", "a.b[1]."])
def test_what_is_not_served_is_refused_by_its_path(prefix: str) -> None:
    """The path begins where the caller says that the message lies."""
    request = model_pb2.LoadModelRequest(model="m", cancel_on_disconnect=True)
    with pytest.raises(FieldNotServed) as caught:
        refuse_unserved(request, prefix=prefix)
    assert caught.value.field == f"{prefix}cancel_on_disconnect"


@pytest.mark.parametrize(
    "request_",
    [
        model_pb2.LoadModelRequest(model="m"),
        model_pb2.LoadModelRequest(model="m", cancel_on_disconnect=False),
        inference_pb2.GenerateRequest(model="m", text="x"),
    ],
)
def test_what_asks_for_nothing_is_let_through(request_: Message) -> None:
    """Neutral values, other fields, and messages that have no such field."""
    refuse_unserved(request_)
