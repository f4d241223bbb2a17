"""An input as it is read and as it is kept."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from mlxd_gateway.common.failures import BadField
from mlxd_gateway.openai.responses.handlers import page_of
from mlxd_gateway.openai.responses.inputs import (
    add_types,
    read_items,
    read_output,
    write_input,
)
from mlxd_gateway.openai.responses.items import FunctionCall
from mlxd_gateway.openai.responses.requests import InputItemsQuery, ResponseRequest

CALL = {"type": "function_call", "id": "own", "call_id": "c", "name": "f", "arguments": "{}"}
SENT: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "d", "name": "f"},
    {"type": "function_call_output", "call_id": "c", "output": [
        {"type": "input_text", "text": "e"}]},
    {"role": "user", "content": [
        {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
]  # fmt: skip


def read(sent: object) -> ResponseRequest:
    """Return the request with this input."""
    body = add_types(json.dumps({"input": sent, "model": "m"}).encode())
    return msgspec.json.decode(body, type=ResponseRequest)


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"3", b"\xff", b'{"input": "a"}', b'{"input": 3}', b'{"input": [3]}',
    b'{"model": "m"}', b'{"input": [{"type": "message"}, {"type": null}]}',
    b'{"input": ' + b"[" * 100_000,
])  # fmt: skip
def test_a_body_without_gaps_is_left_alone(body: bytes) -> None:
    """What is wrong with it, its reader says."""
    assert add_types(body) == body


def test_a_type_that_is_left_out_is_added() -> None:
    """A message has a role; what has none refers to an item. All else is as it was."""
    body = b'{ "input" : [ {"role":"user","content":"a"}, { "id": "i" },{}], "model" : "m" }'
    assert json.loads(add_types(body)) == {
        "input": [
            {"type": "message", "role": "user", "content": "a"},
            {"type": "item_reference", "id": "i"},
            {"type": "item_reference"},
        ],
        "model": "m",
    }


def test_what_is_kept_of_an_input_reads_as_one_again() -> None:
    """Twice the same; each item has an id, which is the client's own where that sent one."""
    kept = write_input(read(SENT).input, "u")
    assert write_input(read_items(kept), "other") == kept
    items = json.loads(kept)
    assert [item["id"] for item in items] == [
        "msg_u_i0", "msg_u_i1", "msg_u_i2", "rs_u_i3", "own", "fco_u_i5", "fco_u_i6", "msg_u_i7",
    ]  # fmt: skip
    assert items[0]["content"] == [{"type": "input_text", "text": "a"}]
    said = {"type": "output_text", "text": "b", "annotations": []}
    assert items[1]["content"] == [said]
    assert items[4] == {**CALL, "status": "completed"}
    assert (items[5]["output"], items[5]["name"]) == ("d", "f")


def test_a_text_is_kept_as_a_message() -> None:
    """Of the user's."""
    (item,) = json.loads(write_input("hi", "u"))
    part = {"type": "input_text", "text": "hi"}
    assert (item["role"], item["content"], item["id"]) == ("user", [part], "msg_u_i0")


def test_the_output_of_a_response_is_read_again() -> None:
    """Whatever else the response holds."""
    response = json.dumps({"id": "r", "tools": [{"type": "x"}], "output": [CALL]}).encode()
    (item,) = read_output(response)
    assert isinstance(item, FunctionCall)
    assert item.call_id == "c"


ITEMS = [Raw(json.dumps({"id": str(number)}).encode()) for number in range(5)]


@pytest.mark.parametrize(("query", "ids", "more"), [
    (InputItemsQuery(), "43210", False),
    (InputItemsQuery(order="asc"), "01234", False),
    (InputItemsQuery(order="asc", limit=2), "01", True),
    (InputItemsQuery(order="asc", limit=2, after="2"), "34", False),
    (InputItemsQuery(limit=2, after="3"), "21", True),
    (InputItemsQuery(after="0"), "", False),
])  # fmt: skip
def test_pages_of_items(query: InputItemsQuery, ids: str, more: bool) -> None:
    """From either end, so many at once, and behind an item."""
    page = page_of(ITEMS, query)
    assert [json.loads(bytes(item))["id"] for item in page["data"]] == list(ids)
    assert page["has_more"] is more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(("field", "query"), [
    ("limit", InputItemsQuery(limit=0)),
    ("limit", InputItemsQuery(limit=101)),
    ("after", InputItemsQuery(after="x")),
])  # fmt: skip
def test_other_pages_are_refused(field: str, query: InputItemsQuery) -> None:
    """By the name of the field."""
    with pytest.raises(BadField) as caught:
        page_of(ITEMS, query)
    assert caught.value.failure.field == field
