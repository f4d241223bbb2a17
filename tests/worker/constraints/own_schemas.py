"""Schemas of our own, one for each keyword that is served, with values that match and do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

DRAFT_4: Final = "http://json-schema.org/draft-04/schema#"
DRAFT_7: Final = "http://json-schema.org/draft-07/schema#"


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, values that match it, and values that do not."""

    schema: Any
    good: tuple[Any, ...]
    bad: tuple[Any, ...]


_TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "boolean"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}

CASES: Final[dict[str, Case]] = {
    "anything": Case(True, ({}, [], 1.5, "x", None, True), ()),
    "types": Case({"type": ["integer", "null"]}, (3, -4, None), ("3", 1.5, [], {})),
    "enum": Case({"enum": ["a", 1, None, [2], {"b": "c"}]}, ("a", 1, None, [2]), ("b", 2, [], {})),
    "const null": Case({"const": None}, (None,), (0, "", False, {})),
    "numbers": Case(
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
        (-1.5, 0, 19.999, 7), (-1.51, 20, 20.0, 100, "1"),
    ),
    "vast bounds": Case(
        {"type": "number", "minimum": -1e308, "maximum": 1e308}, (-1e15, 0.5, 1e15), ("1", None)
    ),
    "whole vast bounds": Case(
        {"type": "integer", "maximum": (1 << 63) - 1}, ((1 << 53) - 1, -5), (1.5, "1")
    ),
    "old bounds": Case(
        {"$schema": DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        (4, 1000), (3, -4, 3.5),
    ),
    "multiples": Case(
        {"type": "integer", "multipleOf": 12, "minimum": -40, "maximum": 40},
        (-36, 0, 24), (-48, 1, 13, 48),
    ),
    "decimals": Case({"multipleOf": 0.25}, (0.25, 0.75, 3, -1.25), (0.3, 0.126)),
    "lengths": Case(
        {"type": "string", "minLength": 2, "maxLength": 4}, ("ab", "äöü\n", "abcd"), ("a", "abcde")
    ),
    "pattern": Case(
        {"type": "string", "pattern": "^[A-Z]{2}-\\d+|x$"},
        ("AB-1", "zx", "AB-9z"), ("A-1", "xz", ""),
    ),
    "escapes": Case(
        {"type": "object", "properties": {"a": {"pattern": "^[^\\\\]*$", "type": "string"},
         "b": {"pattern": "^[^\"x]+$", "type": "string"}}},
        ({"a": 'c"d\n/'}, {"b": "c\\\t"}), ({"a": "c\\d"}, {"b": 'c"'}, {"b": '"'}, {"a": "\\"}),
    ),
    "few members": Case(
        {"type": ["object", "null"], "minProperties": 2, "maxProperties": 3, "required": ["a"],
         "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False},
        (None, {"a": 1, "c": 2}, {"a": 1, "b": 2, "c": 1}), ({}, {"a": 1}, {"b": 1, "c": 1}, 1),
    ),
    "some member": Case(
        {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}},
        ({"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "b": 2, "c": 1}), ({},),
    ),
    "unknown formats": Case(
        {"type": "string", "format": "colour", "minLength": 1}, ("red", "x"), ("", 1)
    ),
    "dates": Case(
        {"type": "string", "format": "date"}, ("2024-02-29", "1999-12-31"), ("2023-02-29", "x")
    ),
    "formats and patterns": Case(
        {"format": "email", "pattern": "@example\\.com$", "type": "string"},
        ("a.b@example.com",),
        ("a@b.com", "a..b@example.com"),
    ),
    "members": Case(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}},
            "required": ["b"],
            "additionalProperties": False,
        },
        ({"b": "x"}, {"a": 1, "b": "x"}), ({}, {"a": 1}, {"b": "y"}, {"b": "x", "c": 1}),
    ),
    "patterned members": Case(
        {
            "type": "object",
            "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}},
            "additionalProperties": {"type": "boolean"},
            "minProperties": 1,
        },
        ({"n_a": 1}, {"s_a": "", "n_b": 2, "other": True}),
        ({}, {"n_a": "1"}, {"s_": 1}, {"other": 1}),
    ),
    "exactly one member": Case(
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
        ({"a": None}, {"b": None}), ({}, {"a": None, "b": None}),
    ),
    "items": Case(
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        ([1], [1, 2, 3]), ([], [1, 2, 3, 4], ["1"]),
    ),
    "tuples": Case(
        {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "type": "array"},
        ([], ["a"], ["a", 1]), ([1], ["a", "b"], ["a", 1, 2]),
    ),
    "old tuples": Case(
        {"$schema": DRAFT_7, "type": "array", "items": [{"type": "string"}],
         "additionalItems": {"type": "null"}, "minItems": 2},
        (["a", None], ["a", None, None]), (["a"], ["a", 1], [None, None]),
    ),
    "any of": Case(
        {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string", "minLength": 2}]},
        (3, -8, "ab"), (4, "a", None),
    ),
    "one of": Case(
        {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
        (3, "a", None), (1.5, True),
    ),
    "all of": Case(
        {
            "allOf": [
                {"properties": {"a": {"minimum": 3}}, "required": ["a"]},
                {"properties": {"a": {"type": "integer", "maximum": 5}}},
            ],
            "type": "object",
            "maxProperties": 1,
        },
        ({"a": 3}, {"a": 5}), ({}, {"a": 2}, {"a": 6}, {"a": 3.5}, {"a": 4, "b": 1}),
    ),
    "references": Case(
        _TREE,
        ({"leaf": True}, {"leaf": False, "kids": [{"leaf": True, "kids": []}]}),
        ({}, {"leaf": 1}, {"leaf": True, "kids": [{"leaf": True}] * 3}),
    ),
    "odd references": Case(
        {"definitions": {"a/b %~": {"type": "integer"}, "c": {"anyOf": [{}, {"type": "null"}]}},
         "anyOf": [{"$ref": "#/definitions/a~1b%20%25~0"}, {"$ref": "#/definitions/c/anyOf/1"}]},
        (1, None), ("a", 1.5, {}),
    ),
    "old references stand alone": Case(
        {"$schema": DRAFT_7, "definitions": {"a": {"type": "integer"}},
         "properties": {"x": {"$ref": "#/definitions/a", "maximum": 3}}, "required": ["x"]},
        ({"x": 9},), ({"x": "9"}, {}),
    ),
    "dependencies": Case(
        {
            "type": "object",
            "properties": {"a": {}, "b": {"type": "integer"}, "c": {"type": "integer"}},
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"b": {"properties": {"c": {"minimum": 5}}}},
            "additionalProperties": False,
        },
        ({}, {"a": 1, "b": 2}, {"b": 1, "c": 5}, {"c": 1}),
        ({"a": 1}, {"a": 1, "c": 9}, {"b": 1, "c": 4}),
    ),
    "neutral": Case(
        {"uniqueItems": False, "not": False, "propertyNames": {}, "unevaluatedProperties": True,
         "if": {"type": "null"}, "type": "array", "x-unknown": {"minimum": "no keyword"}},
        ([1, 1],), ({}, 1),
    ),
    "integers or nothing": Case(
        {"type": ["integer", "null"], "format": "int32"}, (None, -(1 << 31)), (1 << 31, "1")
    ),
    "long integers": Case(
        {"type": "integer", "format": "int32"},
        ((1 << 31) - 1, -(1 << 31)), (1 << 31, -(1 << 31) - 1),
    ),
}  # fmt: skip
