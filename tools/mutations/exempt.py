"""What is not mutated, each kind with the reason: no test could or should tell the mutant apart.

The rules look at one node of the syntax tree; what they exempt is exempt with all that it holds.
"""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m

EXEMPT_FILES = (
    # Stubs that protoc has written.
    "shared/mlxd/v1/",
    # Nothing but numbers that somebody chose: a test names a bound, it does not repeat it.
    "shared/mlxd_shared/config.py",
)

_LOG = re.compile(r"_?(log|logger|LOG)")
_LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log", "bind"}
_FOR_TYPES = {"cast", "TypeVar", "ParamSpec", "NewType", "assert_never", "overload"}
# zip(strict=True) and the like state an invariant; an encoding is what Linux and macOS take anyway;
# names of threads and tasks and a command's help are for people.
_EVALUATING = {"eval", "async_eval", "clear_cache", "synchronize"}
_CODINGS = {"utf-8", "ascii", "latin-1", "strict", "replace", "surrogateescape"}
_CHOSEN = re.compile(r"_?[A-Z0-9_]+_(MAX|MIN|S|MS|NBYTES|BYTES|TOKENS|SHARE|FACTOR|RATIO)")
_SIZE = re.compile(r"_?[A-Z0-9_]+_N?BYTES")
_CHOSEN_NBYTES_MIN = 1024
"""Sizes below are those of a format or a type, which nobody chose."""
_FOR_PEOPLE_OR_INVARIANTS = {
    "strict",
    "encoding",
    "help",
    "metavar",
    "show_default",
    "rich_help_panel",
}


def exempt_file(name: str) -> bool:
    """Tell whether nothing in a file is mutated."""
    return name.startswith(EXEMPT_FILES)


def exempt(node: cst.CSTNode) -> bool:
    """Tell whether a node and all that it holds are left alone."""
    return (
        _is_for_types(node)
        or _is_text_for_people(node)
        or _is_equivalent_by_design(node)
        or _is_declaration(node)
    )


def _is_for_types(node: cst.CSTNode) -> bool:
    """Annotations, aliases of types, casts, Protocols and what only a type checker reads."""
    if isinstance(node, cst.Annotation):  # in Annotated[...] stand the flags of a command
        return not m.matches(node.annotation, m.Subscript(value=m.Name("Annotated")))
    if isinstance(node, cst.TypeAlias | cst.TypeParameters):
        return True
    if isinstance(node, cst.If) and node.orelse is None:
        return m.matches(
            node.test, m.Name("TYPE_CHECKING") | m.Attribute(attr=m.Name("TYPE_CHECKING"))
        )
    if isinstance(node, cst.ClassDef):
        return any(m.matches(base.value, _match_name("Protocol")) for base in node.bases)
    if isinstance(node, cst.Call):
        return isinstance(node.func, cst.Name) and node.func.value in _FOR_TYPES
    return isinstance(node, cst.AnnAssign) and m.matches(
        node.annotation.annotation, m.Name("TypeAlias")
    )


def _is_text_for_people(node: cst.CSTNode) -> bool:
    """Docstrings, what is logged, the words of an error: people read them, tests quote few.

    Words have blanks between them: what has none is a name, a key or a path. Patterns, which are
    raw, are not for people either. The names of codings and of what they do with errors are read by
    Python, in any case of letters.
    """
    if isinstance(node, cst.Expr):
        if isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
            return True
        return isinstance(node.value, cst.Call) and _is_logging(node.value.func)
    if isinstance(node, cst.Assign):
        named = any(m.matches(each.target, m.Name("message")) for each in node.targets)
        return named and isinstance(node.value, cst.BaseString)
    if isinstance(node, cst.SimpleString) and node.raw_value in _CODINGS:
        return True
    return isinstance(node, cst.BaseString) and _has_words(node)


def _has_words(text: cst.BaseString | cst.BaseFormattedStringContent) -> bool:
    match text:
        case cst.SimpleString():
            return "r" not in text.prefix and " " in text.raw_value.strip()
        case cst.FormattedStringText():
            return " " in text.value
        case cst.FormattedString():
            return "r" not in text.prefix and any(map(_has_words, text.parts))
        case cst.ConcatenatedString():
            return _has_words(text.left) or _has_words(text.right)
        case _:
            return False


def _is_equivalent_by_design(node: cst.CSTNode) -> bool:
    """Decorators (slots, frozen), invariants that hold, and what only saves space or time."""
    if isinstance(node, cst.Decorator):
        return True
    if isinstance(node, cst.Assign | cst.AnnAssign):
        return _is_bound(node)
    if isinstance(node, cst.Expr):
        return _is_evaluation(node.value)
    if isinstance(node, cst.Arg):
        if node.keyword is None or node.keyword.value not in _FOR_PEOPLE_OR_INVARIANTS:
            return False
        return node.keyword.value != "strict" or m.matches(node.value, m.Name("True"))
    if isinstance(node, cst.Assert):
        return True
    return isinstance(node, cst.If) and m.matches(node.test, m.Comparison(left=m.Name("__name__")))


def _is_evaluation(value: cst.BaseExpression) -> bool:
    """`mx.eval(...)` and its like: when MLX computes is not what; benchmarks watch over that."""
    if not isinstance(value, cst.Call) or not isinstance(value.func, cst.Attribute):
        return False
    return m.matches(value.func.value, m.Name("mx")) and value.func.attr.value in _EVALUATING


def _is_bound(node: cst.Assign | cst.AnnAssign) -> bool:
    """A number with its unit that somebody chose, as in config.py; or `__slots__`, `__all__`."""
    targets = node.targets if isinstance(node, cst.Assign) else [node]
    names = [each.target.value for each in targets if isinstance(each.target, cst.Name)]
    if {"__slots__", "__all__"}.intersection(names):
        return True
    value = node.value
    is_number = isinstance(value, cst.BaseNumber | cst.BinaryOperation | cst.UnaryOperation)
    if value is None or not is_number or not any(_CHOSEN.fullmatch(name) for name in names):
        return False
    if any(_SIZE.fullmatch(name) for name in names):
        # A sum is derived from something; what was chosen is a number of some unit.
        is_sum = m.matches(value, m.BinaryOperation(operator=m.Add() | m.Subtract()))
        few = isinstance(value, cst.Integer) and value.evaluated_value < _CHOSEN_NBYTES_MIN
        return not is_sum and not few
    return True


def cast_value(node: cst.CSTNode) -> cst.BaseExpression | None:
    """Return what a cast leaves as it is; the cast itself does nothing. None: no cast."""
    if isinstance(node, cst.Call) and m.matches(node.func, m.Name("cast")) and len(node.args) == 2:
        return node.args[1].value
    return None


def _is_declaration(node: cst.CSTNode) -> bool:
    """Imports, and names that are said to be global: a wrong one does not load."""
    return isinstance(node, cst.Import | cst.ImportFrom | cst.Global | cst.Nonlocal)


def _is_logging(func: cst.BaseExpression) -> bool:
    """`log.info`, `self._log.warning` and their like."""
    if not isinstance(func, cst.Attribute) or func.attr.value not in _LOGGING:
        return False
    owner = func.value
    name = owner.attr.value if isinstance(owner, cst.Attribute) else getattr(owner, "value", "")
    return isinstance(name, str) and _LOG.fullmatch(name) is not None


def _match_name(name: str) -> m.BaseMatcherNode:
    """Match a name, alone, with a type argument, or below a module."""
    return (
        m.Name(name)
        | m.Attribute(attr=m.Name(name))
        | m.Subscript(value=m.Name(name) | m.Attribute(attr=m.Name(name)))
    )
