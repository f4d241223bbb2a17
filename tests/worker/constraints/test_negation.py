"""What has not to match a schema: not, oneOf and if, judged value by value."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.constraints.pattern_sets import PatternSets
from mlxd_worker.constraints.patterns import search_pattern
from mlxd_worker.engine.masks.constraint import Constraint
from tests.support.constrained import accepts, schema
from tests.support.ecma import found, written_matches
from tests.support.effort import examples
from tests.support.schema_walks import Judge

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
        {"dependentRequired": {"a": ["b"]}}, {"multipleOf": 2}, {"uniqueItems": True},
    ]
)  # fmt: skip


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
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
        st.builds(lambda i, t, e: {"if": i, "then": t, "else": e}, inner, inner, inner),
    )


schemas = st.recursive(leaves, nested, max_leaves=6)


def accepted(constraint: Constraint) -> list[Any]:
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


def compiled(wanted: Any) -> Constraint | None:
    """Return a schema's constraint; None where it is not served, or nothing matches it."""
    try:
        return schema(json.dumps(wanted))
    except InvalidRequest:
        return None


@settings(max_examples=examples(60), deadline=None)
@given(inner=schemas)
def test_what_is_accepted_is_what_matches(inner: Any) -> None:
    """Of some values those are accepted that match, and no others; or the schema is refused."""
    wanted = {"not": inner}
    constraint, judge = compiled(wanted), Judge(wanted)
    if constraint is not None:
        found = accepted(constraint)
        right = [value for value in VALUES if judge.accepts(value)]
        left_out = [value for value in right if value not in found]
        assert [value for value in found if not judge.accepts(value)] == []
        assert left_out == [] or any(word in json.dumps(wanted) for word in ("oneOf", '"if"'))


@pytest.mark.parametrize(
    "wanted",
    [
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}],
         "type": "object"},
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "minLength": 3}]},
        {"oneOf": [{"items": {"type": "string"}, "type": "array"},
                   {"items": {"type": "integer"}, "type": "array"}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
                   {"properties": {"a": {"const": None}}}], "type": "object"},
        {"oneOf": [{"type": "object", "properties": {"a": {}}, "additionalProperties": False},
                   {"type": "object", "properties": {"b": {}}, "additionalProperties": False}]},
        {"type": ["object", "string"], "not": {"required": ["a"]}},
        {"type": "string", "not": {"enum": ["a", "ab"]}},
        {"type": "string", "not": {"pattern": "b"}},
        {"type": "number", "not": {"enum": [1, 0.5]}},
        {"properties": {"a": {"not": {"type": "integer"}, "type": ["string", "integer"]}},
         "type": "object"},
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
         "then": {"required": ["b"]}, "else": {"maxProperties": 1}, "type": "object"},
        {"enum": list(VALUES), "uniqueItems": True, "contains": {"type": "integer"}},
        {"enum": list(VALUES), "not": {"patternProperties": {"a|b": {"type": "integer"}}}},
        {"allOf": [{"enum": list(VALUES)}, {"oneOf": [{"type": "string"}, {"maxLength": 1}]}]},
        {"$defs": {"n": {"not": {"$ref": "#/$defs/s"}}, "s": {"type": "string"}},
         "$ref": "#/$defs/n"},
    ],
)  # fmt: skip
def test_common_shapes_are_served(wanted: Any) -> None:
    """Choices of members, of patterns, of constants: each is compiled, and means what it says."""
    constraint, judge = schema(json.dumps(wanted)), Judge(wanted)
    right = [value for value in VALUES if judge.accepts(value)]

    assert right
    assert accepted(constraint) == right


@pytest.mark.parametrize(
    "inner",
    [
        {"type": "string"}, {"type": ["number", "null"]}, {"const": "b"}, {"enum": ["a", 1, None]},
        {"minLength": 1}, {"minLength": 2}, {"maxLength": 1}, {"maxLength": 3}, {"pattern": "^a"},
        {"minimum": 1}, {"maximum": 1}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 1},
        {"minItems": 1}, {"minItems": 2}, {"maxItems": 0}, {"maxItems": 1},
        {"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 0},
        {"required": ["a"]}, {"allOf": [{"minLength": 1}, {"maxLength": 1}]},
        {"anyOf": [{"type": "string"}, {"minimum": 1}]}, {"not": {"maxItems": 1}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_does_not_match_one_keyword(inner: Any) -> None:
    """Each keyword that has an opposite means just that, at its very bound too."""
    wanted = {"not": inner}
    constraint, judge = schema(json.dumps(wanted)), Judge(wanted)

    assert accepted(constraint) == [value for value in VALUES if judge.accepts(value)]


@pytest.mark.parametrize(
    "kept",
    [
        *({name: bound} for name in ("minLength", "maxLength") for bound in (0, 1, 2)),
        *({name: bound} for name in ("minItems", "maxItems") for bound in (0, 1, 2)),
        *({"minProperties": bound} for bound in (0, 1)),
        *({"maxProperties": bound} for bound in (0, 1, 2)),
        *({name: bound} for name in ("minimum", "maximum") for bound in (-3, 0.5, 1)),
        *({f"exclusive{name}": bound} for name in ("Minimum", "Maximum") for bound in (0.5, 1)),
        {"required": []}, {"required": ["a"]}, {"required": ["a", "b"]}, {"required": ["c", "a"]},
        {"multipleOf": 0.5}, {"multipleOf": 7}, {"pattern": "b"}, {"uniqueItems": True},
        {"propertyNames": {"enum": ["a"]}}, {"dependentRequired": {"b": ["a"]}},
        {"contains": {"type": "string"}}, {"contains": {"const": 1}, "maxContains": 0},
        {"prefixItems": [{"type": "integer"}]}, {"items": {"type": "integer"}},
        {"properties": {"a": {"type": "integer"}}}, {"additionalProperties": False},
        {"patternProperties": {"^a$": {"type": "string"}}}, {"oneOf": [{"minLength": 2}, True]},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_constants_are_judged_one_by_one(kept: Any) -> None:
    """Of the values of an enumeration those are left that match, at the very bound too."""
    wanted = {"enum": list(VALUES), **kept}
    judge = Judge(wanted)
    right = [value for value in VALUES if judge.accepts(value)]
    constraint = compiled(wanted)

    assert (constraint and accepted(constraint)) == (right or None)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"not": {"format": "email"}}, "#/not/format: is served only where"),
        ({"not": {"multipleOf": 3}}, "#/not/multipleOf: is not served where"),
        ({"not": {"type": "integer"}}, "#/not/type: to be no integer"),
        ({"not": {"items": {"type": "integer"}}}, "#/not/items: is not served where"),
        ({"not": {"type": "strnig"}}, "#/not/type: 'strnig' is no type"),
        ({"not": {"required": 3}}, "#/not/required: a list of names"),
        ({"not": {"enum": [[1]]}}, "#/not/enum: to be no certain array"),
        ({"not": {"$ref": "#/a"}}, "#/not/$ref: '#/a' is not in this text"),
        ({"not": {"minLength": "x"}}, "#/not/minLength: a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(wanted: Any, problem: str) -> None:
    """Nothing is let through where it would take what no mask can say; the place is told."""
    with pytest.raises(InvalidRequest) as caught:
        schema(json.dumps(wanted))

    assert caught.value.violations[0].description.startswith(problem)


TEXTS = ("", "a", "b", "ab", "ba", "aab", "abab", "c", "-", "a\n", "é", "\U0001f600", "aaaa")
patterns = st.sampled_from(
    ["a", "^a", "a$", "^(ab)*$", "^[^a]*$", "b|^$", "^.{2}$", "^(?:a|ab)(b|)$", "a.*b", "^a?b?$"]
)


@settings(max_examples=examples(40), deadline=None)
@given(first=patterns, second=patterns)
def test_expressions_as_sets(first: str, second: str) -> None:
    """Found or not as an engine of the language says; the opposite matches the other texts."""
    sets = PatternSets()
    opposite = sets.without(first)
    for text in TEXTS:
        assert sets.is_found(first, text) == found(first, text)
        assert written_matches(opposite, text) == (not found(first, text)), text
        if sets.never_both(first, second):
            assert not (found(first, text) and found(second, text))
    assert sets.never_both("^a", "^b")
    assert not sets.never_both("^a", "b$")
    assert written_matches(search_pattern(first), "zz") != written_matches(opposite, "zz")


MANY = "(a|b)*a(a|b){25}"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"type": "string", "not": {"pattern": MANY}}, "too l"),
        ({"enum": ["ab" * 3000], "not": {"pattern": "a(a|b){3000}c"}}, "too l"),
        ({"oneOf": [{"type": "object", "required": [f"a{i}"]} for i in range(300)]}, "parts"),
    ],
)
def test_work_is_bounded(wanted: Any, problem: str) -> None:
    """What would take minutes to tell apart is refused."""
    with pytest.raises(InvalidRequest, match=problem):
        schema(json.dumps(wanted))


def test_many_constants_are_told_apart_at_once() -> None:
    """A list of alternatives, each of them a constant, is as good as an enumeration."""
    wanted = {"oneOf": [{"const": f"c{i}", "title": str(i)} for i in range(1000)]}
    constraint = schema(json.dumps(wanted))

    assert accepts(constraint, '"c999"')
    assert not accepts(constraint, '"c1000"')


def test_all_texts_but_some() -> None:
    """One text may begin another."""
    opposite = PatternSets().without_texts(["a", "ab", "é"])

    assert [text for text in TEXTS if not written_matches(opposite, text)] == ["a", "ab", "é"]
