"""One function a rule: from one file to its findings, each `path:line: what and what instead`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from tests.tidy.names import participles, vague_names
from tests.tidy.tree import Source

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
PROSE_COLUMNS_MAX = 120

# Spelled in halves, so that this file passes its own rules.
BANNED_WORDS = {
    "TO" + "DO": "do it, or write it down in an issue",
    "FIX" + "ME": "fix it",
    "X" + "XX": "say what is wrong",
}
# The adapter for models of another library meets objects whose types nobody wrote down.
DYNAMIC_ALLOWED = {"worker/mlxd_worker/models/zoo/adapter.py"}
BANNED_CALLS = {
    "has" + "attr": "declare the type instead of asking the object",
    "glob" + "als": "use a registry that names its members",
}
LOCAL_PATH = re.compile(r"(?<![\w.$}~-])/(?:work|root|home|Users)/")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Rule: TypeAlias = Callable[[Source], Iterator[str]]


def functions(source: Source) -> Iterator[Function]:
    """Every function and method of a Python file, nested ones too."""
    for node in source.nodes:
        if isinstance(node, Function):
            yield node


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a Python file whose callee is a plain dotted name, with that name."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            name = dotted_name(node.func)
            if name is not None:
                yield name, node


def dotted_name(node: ast.expr) -> str | None:
    """Return a plain dotted name as it is written; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        holder = dotted_name(node.value)
        return None if holder is None else f"{holder}.{node.attr}"
    return None


def file_length(source: Source) -> Iterator[str]:
    """Hold a file of code to FILE_LINES_MAX lines."""
    count = len(source.lines)
    if source.is_code and count > FILE_LINES_MAX:
        yield source.at(FILE_LINES_MAX, f"{count} lines; split it, at most {FILE_LINES_MAX}")


def columns(source: Source) -> Iterator[str]:
    """Hold a line of code to COLUMNS_MAX columns."""
    if not source.is_code:
        return
    for number, line in enumerate(source.lines, start=1):
        if len(line) > COLUMNS_MAX:
            yield source.at(number, f"{len(line)} columns; at most {COLUMNS_MAX}")


def prose_columns(source: Source) -> Iterator[str]:
    """Hold a line of prose to PROSE_COLUMNS_MAX columns; rows of tables and code may be longer."""
    if not source.name.endswith(".md"):
        return
    in_code = False
    for number, line in enumerate(source.lines, start=1):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        is_table_or_heading = line.lstrip().startswith(("|", "#"))
        if not (fence or in_code or is_table_or_heading) and len(line) > PROSE_COLUMNS_MAX:
            yield source.at(number, f"{len(line)} columns of prose; at most {PROSE_COLUMNS_MAX}")


def function_length(source: Source) -> Iterator[str]:
    """Hold a function to FUNCTION_LINES_MAX lines, its docstring included."""
    if not source.is_python:
        return
    for node in functions(source):
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if count > FUNCTION_LINES_MAX:
            message = f"{node.name} has {count} lines; at most {FUNCTION_LINES_MAX}"
            yield source.at(node.lineno, message)


def banned_words(source: Source) -> Iterator[str]:
    """Find words that promise work instead of doing it."""
    if not (source.is_code or source.is_prose):
        return
    for number, line in enumerate(source.lines, start=1):
        for word, instead in BANNED_WORDS.items():
            if re.search(rf"\b{word}\b", line):
                yield source.at(number, f"{word}: {instead}")


def local_paths(source: Source) -> Iterator[str]:
    """Find paths that exist on one machine only."""
    for number, line in enumerate(source.lines, start=1):
        if LOCAL_PATH.search(line):
            yield source.at(number, "a path of one machine; derive it, or take it as an argument")


def dynamic_tricks(source: Source) -> Iterator[str]:
    """Find code that asks an object or a module what it is."""
    if not source.is_python or source.name in DYNAMIC_ALLOWED:
        return
    for name, node in calls(source):
        if name in BANNED_CALLS:
            yield source.at(node.lineno, f"{name}: {BANNED_CALLS[name]}")


def file_docstring(source: Source) -> Iterator[str]:
    """Every Python file opens with its invariants."""
    if source.is_python and not (ast.get_docstring(source.tree) or "").strip():
        yield source.at(1, "no docstring; say what always holds here")


def rule_of_each_test(source: Source) -> Iterator[str]:
    """Every test states its rule."""
    if not source.in_tests:
        return
    for node in functions(source):
        if node.name.startswith("test_") and not (ast.get_docstring(node) or "").strip():
            yield source.at(node.lineno, f"{node.name} has no docstring; state the rule it proves")


def sleeping_tests(source: Source) -> Iterator[str]:
    """Tests wait on events; `asyncio.sleep(0)`, which only yields, is fine."""
    if not source.in_tests:
        return
    for name, node in calls(source):
        if name == "time.sleep":
            yield source.at(node.lineno, "time.sleep: wait on an event")
        if name == "asyncio.sleep" and [ast.unparse(arg) for arg in node.args] != ["0"]:
            yield source.at(node.lineno, "asyncio.sleep: wait on an event")


def patching_tests(source: Source) -> Iterator[str]:
    """Tests use real things and fakes at the seams; they never patch a module."""
    if not source.in_tests:
        return
    for name, node in calls(source):
        if name.endswith("monkeypatch.setattr"):
            yield source.at(node.lineno, "monkeypatch.setattr: pass a fake in at the seam")


RULES: tuple[Rule, ...] = (
    file_length,
    columns,
    prose_columns,
    function_length,
    banned_words,
    local_paths,
    dynamic_tricks,
    file_docstring,
    rule_of_each_test,
    sleeping_tests,
    patching_tests,
    vague_names,
    participles,
)
