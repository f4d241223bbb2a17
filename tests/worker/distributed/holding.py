"""Formats that hold streams over ranks, in the demo model's vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.chat.parsing.registry import output_format
from mlxd_worker.constraints.calls.grammar import CallFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.calls import CallConstraint, Marks
from mlxd_worker.engine.masks.constraint import Constraint

SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
PATTERN: Final = r"(cat|dog)( [a-z]{2,6}){3,9}"
RULES: Final = 'root ::= ("a" | "the") (" " [a-z]+){2,8} "!"'
TOOL: Final = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": ["bird", "tree"]}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    }
)
OPENING: Final = b"e wa"
"""What begins a call of `calls`: the token behind " was" after "he" or "she" has more beyond it."""
BEHIND: Final = r"s( [a-z]{2,7}){2,4}\."
WAKES: Final = re.compile(OPENING.decode() + BEHIND)


def hold(formats: Constraints, kind: str) -> Constraint | CallConstraint:
    """Return a constraint of a kind, one of `SOUND`."""
    if kind == "required":
        output = output_format("<tool_call></tool_call>")
        return formats.compile(CallFormat(output, (TOOL,), required=True, several=False))
    if kind == "calls":
        grammar = formats.compile(ResponseFormat(FormatKind.REGEX, BEHIND))
        return formats.watch(grammar, Marks(OPENING), ends=False)
    language, text = {
        "json": (FormatKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        "regex": (FormatKind.REGEX, PATTERN),
        "grammar": (FormatKind.EBNF_GRAMMAR, RULES),
    }[kind]
    return formats.compile(ResponseFormat(language, text))


def _is_json(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(set(value) == set(SCHEMA["properties"]) and 0 <= value["age"] <= 99)


SOUND: Final[Mapping[str, Callable[[str], object]]] = {
    "json": _is_json,
    "regex": re.compile(PATTERN).fullmatch,
    "grammar": re.compile(r"(a|the)( [a-z]+){2,8}!").fullmatch,
    "required": re.compile(
        r'\s*<tool_call>\s*{\s*"name":\s*"look",\s*"arguments":\s*'
        r'{\s*"at":\s*"(bird|tree)"\s*}\s*}\s*</tool_call>'
    ).fullmatch,
    "calls": WAKES.search,
}
"""What a whole answer of each kind is; of `calls` one in which a call begins, and ends."""
