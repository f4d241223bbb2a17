"""What becomes of fields: refused at any depth by their path, unless they ask for nothing."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import pytest

from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import Kind, fates_of, pass_over, refuse, turn_down


class Inner(msgspec.Struct):
    """A part of a request."""

    loud: Annotated[Any, turn_down("nothing here is loud", neutral=(False,))] = None


class Outer(msgspec.Struct, rename={"kind": "type"}):
    """A request."""

    kind: Annotated[str | None, turn_down("there is one kind", neutral=("plain", "simple"))] = None
    parts: list[Inner] | None = None
    tag: Annotated[Any, pass_over("for others")] = None


@pytest.mark.parametrize("kind", [None, "plain", "simple"])
def test_what_asks_for_nothing_is_good(kind: str | None) -> None:
    """Null and the values that are neutral are no reason to refuse a request."""
    refuse(Outer(kind=kind, parts=[Inner(loud=False), Inner()], tag={"a": 1}))


def test_a_field_is_refused_by_its_name_in_json() -> None:
    """The error names the field as the client has written it, and says why."""
    with pytest.raises(BadField) as caught:
        refuse(Outer(kind="grand"))
    assert caught.value.failure.field == "type"
    assert caught.value.failure.message == "type: there is one kind"


def test_a_field_of_a_part_is_refused_by_its_path() -> None:
    """Lists and structs within a request are walked."""
    with pytest.raises(BadField) as caught:
        refuse(Outer(parts=[Inner(), Inner(loud=True)]))
    assert caught.value.failure.field == "parts[1].loud"


def test_what_has_no_fields_is_not_walked() -> None:
    """A value that is passed over may be nested as deep as JSON is read."""
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    refuse(Outer(tag=deep))


def test_every_field_has_a_fate() -> None:
    """Honoured is what no annotation says otherwise of."""
    kinds = {name: fate.kind for name, fate in fates_of(Outer).items()}
    assert kinds == {"type": Kind.REFUSED, "parts": Kind.HONOURED, "tag": Kind.PASSED_OVER}
