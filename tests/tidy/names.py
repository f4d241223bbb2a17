"""Rules about names: a function is a verb, and a name says what the thing is.

A bare participle (`rendered`, `held`) leaves open who acts; properties, fixtures and tests may be
adjectives or sentences.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.tree import Source

VAGUE_NAMES = frozenset({"it", "told", "found", "asked", "given"})
# Fields of errors that programs read.
VAGUE_ALLOWED = {"shared/mlxd_shared/domain/errors.py": {"asked"}}
VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "succeed"})
IRREGULAR_PARTICIPLES = re.compile(
    "begun|bent|bound|broken|brought|built|caught|chosen|dealt|drawn|driven|fallen|fed|felt"
    "|flown|forgotten|found|frozen|given|gone|got|grown|heard|held|hidden|hung|kept|known|laid"
    "|led|left|lent|lost|made|meant|met|paid|ran|risen|said|saw|seen|sent|shaken|shown|shrunk"
    "|sold|sought|spent|spoken|stolen|stood|struck|stuck|sung|sunk|swept|taken|taught|thought"
    "|thrown|told|took|torn|understood|went|won|worn|wound|written"
)


def vague_names(source: Source) -> Iterator[str]:
    """Find locals, parameters, attributes and functions that are named by a pronoun or `found`."""
    if not source.is_python:
        return
    allowed = VAGUE_ALLOWED.get(source.name, set())
    for node in source.nodes:
        name = _bound_name(node)
        if name.strip("_") in VAGUE_NAMES - allowed:
            yield source.at(_line(node), f"`{name}` says nothing of the thing; name it")


def participles(source: Source) -> Iterator[str]:
    """Find functions that are named by a participle alone: a function is a verb."""
    if not source.is_python:
        return
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_described(node):
            word = node.name.strip("_").lower()
            is_regular = word.endswith("ed") and word not in VERBS_IN_ED
            if (is_regular and "_" not in word) or IRREGULAR_PARTICIPLES.fullmatch(word):
                yield source.at(node.lineno, f"{node.name} is a participle; name the action")


def _bound_name(node: ast.AST) -> str:
    match node:
        case ast.arg(name) | ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
            return name
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.MatchAs(_, str(name)):
            return name
    return ""


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def _is_described(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a decorator makes the function a value: a property or a fixture."""
    written = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("property" in name or "fixture" in name for name in written)
