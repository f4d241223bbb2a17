"""What becomes of fields: refused at any depth by their path, unless they ask for nothing."""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import pytest

from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.cohere import requests as cohere
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import (
    ABSENT,
    Kind,
    fates_of,
    foreign,
    let_go,
    pass_over,
    refuse,
    turn_down,
)
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.openai import requests as openai
from mlxd_gateway.openai.responses import items
from mlxd_gateway.openai.responses import requests as responses


class Inner(msgspec.Struct):
    """A part of a request."""

    loud: Annotated[Any, turn_down("nothing here is loud", neutral=(False,))] = None
    note: Annotated[msgspec.Raw, pass_over("for others")] = ABSENT


class Outer(msgspec.Struct, rename={"kind": "type"}):
    """A request."""

    kind: Annotated[str | None, turn_down("there is one kind", neutral=("plain", "simple"))] = None
    parts: list[Inner] | None = None
    tag: Annotated[msgspec.Raw, pass_over("for others")] = ABSENT


@pytest.mark.parametrize("kind", [None, "plain", "simple"])
def test_what_asks_for_nothing_is_good(kind: str | None) -> None:
    """Null and the values that are neutral are no reason to refuse a request."""
    refuse(Outer(kind=kind, parts=[Inner(loud=False), Inner()], tag=msgspec.Raw(b'{"a":1}')))


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


REQUESTS = [
    kind
    for requests in (openai, items, responses, anthropic, ollama, cohere)
    for kind in vars(requests).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
]


def test_what_is_passed_over_is_not_read() -> None:
    """Nothing is made of it, however large and nested it is: no such field is of any type."""
    for kind in REQUESTS:
        hints = get_type_hints(kind, include_extras=True)
        names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        for name, encoded in names:
            if fates_of(kind)[encoded].kind is Kind.PASSED_OVER:
                assert get_args(hints[name])[0] is not Any, (kind, name)


def test_what_is_passed_over_is_given_up() -> None:
    """At any depth: it would keep the body alive for as long as the request is."""
    request = msgspec.json.decode(b'{"parts":[{"note":[1,[2]]}],"tag":{"a":[]}}', type=Outer)
    assert request.parts is not None
    assert bytes(request.parts[0].note) == b"[1,[2]]"

    let_go(request)

    assert request.parts[0].note is request.tag is ABSENT


def test_a_part_that_is_not_served_is_refused_by_its_type() -> None:
    """Wherever it stands, and whatever else it holds."""
    star, moon = foreign("nothing here shines", "star", "moon")
    kind = msgspec.defstruct("Sky", [("parts", GenericAlias(list, (star | moon,)))])
    with pytest.raises(BadField) as caught:
        refuse(msgspec.json.decode(b'{"parts":[{"type":"moon","full":true}]}', type=kind))
    assert caught.value.failure.field == "parts[0].type"
    assert caught.value.failure.message == "parts[0].type: nothing here shines"


def test_every_field_has_a_fate() -> None:
    """Honoured is what no annotation says otherwise of."""
    kinds = {name: fate.kind for name, fate in fates_of(Outer).items()}
    assert kinds == {"type": Kind.REFUSED, "parts": Kind.HONOURED, "tag": Kind.PASSED_OVER}
