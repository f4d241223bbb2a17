"""Options of oneOf that exclude each other or are kept apart, and not: judged value by value."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.engine.masks.constraint import Constraint
from tests.support.constrained import accepts, schema
from tests.support.effort import examples
from tests.support.schema_walks import Judge
from tests.worker.constraints.own_schemas import DRAFT_7

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 7, -3, 0.5, "", "a", "b", "ab", "xa", "abcd", [], [1], ["a"],
    [1, "a"], {}, {"a": 1}, {"a": "b"}, {"b": None}, {"a": 1, "b": 2}, {"a": None, "b": "a"},
    {"c": 1}, {"a": 1, "c": []},
)  # fmt: skip

leaves = st.sampled_from(
    [
        True, False, {}, {"type": "string"}, {"type": ["object", "null"]}, {"type": "number"},
        {"type": ["boolean", "array"]}, {"enum": ["a", 1, None]}, {"const": "b"},
        {"enum": [True, 2]}, {"minimum": 1}, {"exclusiveMaximum": 2}, {"minLength": 1},
        {"maxLength": 1},
        {"pattern": "^a"}, {"pattern": "b$"}, {"minItems": 1}, {"maxItems": 0}, {"required": ["a"]},
        {"required": ["a", "b"]}, {"items": {"type": "string"}}, {"enum": [[], {}, "ab"]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        {"dependentRequired": {"a": ["b"]}}, {"multipleOf": 2}, {"minProperties": 1},
    ]
)  # fmt: skip


def nest_schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas that are made of others."""
    two = st.lists(inner, min_size=1, max_size=3)
    members = st.dictionaries(st.sampled_from("ab"), inner, min_size=1)
    return st.one_of(
        st.builds(lambda s: {"not": s}, inner),
        st.builds(lambda s: {"oneOf": s}, two),
        st.builds(lambda s: {"anyOf": s}, two),
        st.builds(lambda s: {"allOf": s}, two),
        st.builds(lambda s: {"properties": s}, members),
        st.builds(lambda s: {"type": "object", "properties": s, "required": ["a"]}, members),
    )


schemas = st.recursive(leaves, nest_schemas, max_leaves=6)


def accepted_values(constraint: Constraint) -> list[Any]:
    """Return the values that are accepted, their members in some order."""
    return [
        value
        for value in VALUES
        if any(accepts(constraint, json.dumps(ordered)) for ordered in orders(value))
    ]


def orders(value: Any) -> list[Any]:
    """Return a value with its members in each order."""
    if not isinstance(value, dict):
        return [value]
    return [dict(members) for members in itertools.permutations(value.items())]


def compile_schema(wanted: Any) -> Constraint | None:
    """Return a schema's constraint; None where it is not served, or nothing matches it."""
    try:
        return schema(json.dumps(wanted))
    except InvalidRequest:
        return None


@settings(max_examples=examples(90), deadline=None)
@given(wanted=st.one_of(schemas, st.builds(lambda s: {"oneOf": s}, st.lists(leaves, min_size=2))))
def test_what_is_accepted_matches(wanted: Any) -> None:
    """Of some values no other is accepted; without oneOf none is left out; or it is refused."""
    constraint, judge = compile_schema(wanted), Judge(wanted)
    if constraint is not None:
        taken = accepted_values(constraint)
        right = [value for value in VALUES if judge.accepts(value)]
        assert [value for value in taken if value not in right] == []
        assert taken == right or "oneOf" in json.dumps(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}],
         "type": "object"},
        {"oneOf": [{"items": {"type": "string"}, "type": "array", "minItems": 1},
                   {"items": {"type": "integer"}, "type": "array"}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
                   {"properties": {"a": {"const": None}}}], "type": "object"},
        {"oneOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]},
                   {"type": "object", "properties": {"b": {}}, "additionalProperties": False}]},
        {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}]},
        {"oneOf": [{"type": "number", "maximum": 1}, {"type": "integer", "minimum": 2}]},
        {"properties": {"a": {}}, "required": ["a"], "type": "object",
         "oneOf": [{"properties": {"a": {"enum": ["b"]}}}, {"properties": {"a": {"enum": [1]}}}]},
        {"oneOf": [{"$ref": "#/$defs/s"}, {"anyOf": [{"type": "null"}, {"type": "array"}]}],
         "$defs": {"s": {"allOf": [{"type": "string"}]}}},
        {"type": ["object", "string"], "not": {"required": ["a"]}},
        {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        {"not": {"type": ["number", "null"]}}, {"not": {"not": {"minLength": 2}}},
        {"not": {"required": ["a", "b"]}}, {"type": "string", "not": False},
        {"$defs": {"n": {"not": {"$ref": "#/$defs/s"}}, "s": {"type": "string"}},
         "$ref": "#/$defs/n"},
    ],
    ids=lambda wanted: json.dumps(wanted)[:60],
)  # fmt: skip
def test_common_shapes_are_served(wanted: Any) -> None:
    """Choices of members, of kinds, of constants: each is compiled, and means what it says."""
    constraint, judge = schema(json.dumps(wanted)), Judge(wanted)
    right = [value for value in VALUES if judge.accepts(value)]

    assert right
    assert accepted_values(constraint) == right


def test_an_option_is_kept_from_what_another_requires() -> None:
    """A value with the members of both is left out: what else tells them apart is not written."""
    options = [
        {"type": "object", "properties": {n: {"type": "integer"}}, "required": [n]} for n in "ab"
    ]
    constraint = schema(json.dumps({"oneOf": options}))

    assert accepted_values(constraint) == [{"a": 1}, {"a": 1, "c": []}]
    assert accepts(constraint, '{"b": 1}')
    assert not accepts(constraint, '{"a": 1, "b": 1}')
    assert not accepts(constraint, '{"a": 1, "b": "x"}'), "valid, but left out"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"not": {"format": "email"}}, "#/not: is not served under not"),
        ({"not": {"enum": ["a"]}}, "#/not: is not served under not"),
        ({"items": {"not": {"type": "integer"}}}, "#/items/not: is not served under not"),
        ({"not": {"anyOf": [{}, {"pattern": "a"}]}}, "#/not/anyOf/1: is not served under not"),
        ({"not": {"$ref": "#/a"}}, "#/not/$ref: '#/a' is not in this text"),
        ({"not": {"not": {"type": "strnig"}}}, "#/not/type: 'strnig' is not a type"),
        ({"not": {"anyOf": [5]}}, "#/not/anyOf/0: a schema is an object, true or false"),
        ({"not": {"type": "strnig"}}, "#/not/type: 'strnig' is not a type"),
        ({"not": {"required": ["a", 1]}}, "#/not/required: a list of names is needed"),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "minLength": 3}]},
         "#/oneOf/1: is not seen to exclude another option"),
        ({"$schema": DRAFT_7, "definitions": {"a": {"type": "integer"}},
          "oneOf": [{"$ref": "#/definitions/a", "const": 1}, {"const": 2}]},
         "#/oneOf/1: is not seen to exclude another option"),
        ({"oneOf": [{"minimum": 3}, True]}, "#/oneOf/1: is not seen to exclude another option"),
        ({"oneOf": []}, "#/oneOf: a list of at least one value is needed"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "#/if: is not served"),
        ({"enum": [[1]], "uniqueItems": True}, "#/uniqueItems: is not served"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(wanted: Any, problem: str) -> None:
    """Nothing is let through where it would take what no mask can say; the place is told."""
    with pytest.raises(InvalidRequest) as caught:
        schema(json.dumps(wanted))

    assert caught.value.violations[0].description.startswith(problem)


def test_work_is_bounded() -> None:
    """What would take minutes to tell apart is refused."""
    wanted = {"oneOf": [{"type": "object", "required": [f"a{i}"]} for i in range(400)]}
    with pytest.raises(InvalidRequest, match="more than 50000 parts"):
        schema(json.dumps(wanted))


def test_many_constants_are_told_apart_at_once() -> None:
    """A list of alternatives, each of them a constant, is as good as an enumeration."""
    wanted = {"oneOf": [{"const": f"c{i}", "title": str(i)} for i in range(1000)]}
    constraint = schema(json.dumps(wanted))

    assert accepts(constraint, '"c999"')
    assert not accepts(constraint, '"c1000"')
