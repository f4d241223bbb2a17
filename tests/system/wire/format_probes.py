"""Probes of response formats, through the controller."""

from __future__ import annotations

import json
import re
from typing import Any

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.system.wire.probe import Probes, Wire, refusal

PROBES = Probes()
covering = PROBES.covering
_SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "age": {"type": "integer", "maximum": 9}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}


async def _read_formatted(wire: Wire, **kind: Any) -> str:
    """Return the text of a stream that must end by itself."""
    messages = await wire.generate(
        response_format=inference_pb2.ResponseFormat(**kind),
        sampling=types_pb2.SamplingOptions(temperature=1.0, seed=3, top_k=0),
        max_tokens=200,
    )
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_EOS
    return "".join(message.text for message in messages)


async def _read_refusal(wire: Wire, **kind: Any) -> tuple[str, str]:
    """Return the field that is refused, and why."""
    error = await refusal(wire.generate(response_format=inference_pb2.ResponseFormat(**kind)))
    assert isinstance(error, InvalidRequest)
    return error.violations[0].field, error.violations[0].description


@covering("GenerateRequest.response_format", "ResponseFormat.json_schema")
async def output_matches_its_schema(wire: Wire) -> None:
    """Every member is there and in range; a keyword that is not served is named by its place."""
    value = json.loads(await _read_formatted(wire, json_schema=json.dumps(_SCHEMA)))
    assert list(value) == ["mood", "age"]
    assert value["mood"] in ("glad", "sad")
    assert value["age"] <= 9
    field, reason = await _read_refusal(wire, json_schema='{"items": {"uniqueItems": true}}')
    assert field == "response_format.json_schema"
    assert reason.startswith("#/items/uniqueItems: ")


@covering("ResponseFormat.json_object")
async def output_is_an_object(wire: Wire) -> None:
    """Any object; false asks for nothing. Going on past the end is refused beside it."""
    assert isinstance(json.loads(await _read_formatted(wire, json_object=True)), dict)
    none = inference_pb2.ResponseFormat(json_object=False)
    assert await wire.ids(response_format=none) == await wire.ids()
    both = inference_pb2.ResponseFormat(json_object=True)
    error = await refusal(wire.generate(response_format=both, ignore_eos=True))
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "ignore_eos"


@covering("ResponseFormat.regex")
async def output_matches_its_expression(wire: Wire) -> None:
    """The whole output matches; a mistake is told with its place."""
    expression = r"[A-Z][a-z]{2,8} (ran|sat)\."
    assert re.fullmatch(expression, await _read_formatted(wire, regex=expression))
    field, reason = await _read_refusal(wire, regex="a(?=b)")
    assert field == "response_format.regex"
    assert reason.endswith("at character 2 of the expression")


@covering("ResponseFormat.ebnf_grammar")
async def output_is_of_its_grammar(wire: Wire) -> None:
    """Brackets that a grammar pairs are paired; a mistake is told by line and column."""
    grammar = 'root ::= nest "."\nnest ::= "(" nest ")" | "a" | "b"\n'
    text = await _read_formatted(wire, ebnf_grammar=grammar)
    assert text.count("(") == text.count(")")
    assert text.strip("().") in ("a", "b")
    field, reason = await _read_refusal(wire, ebnf_grammar="root ::= nest\n")
    assert field == "response_format.ebnf_grammar"
    assert reason.startswith("1:10: ")


@covering("ResponseFormat.choice", "ChoiceFormat.choices")
async def output_is_one_of_the_texts(wire: Wire) -> None:
    """One of the texts and nothing else; without any it is refused."""
    choices = ["yes", "no", "yes, but"]
    assert (
        await _read_formatted(wire, choice=inference_pb2.ChoiceFormat(choices=choices)) in choices
    )
    field, _ = await _read_refusal(wire, choice=inference_pb2.ChoiceFormat())
    assert field == "response_format.choice.choices"
