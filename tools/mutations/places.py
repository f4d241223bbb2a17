"""Where a source file can be mutated, and how: mutmut's operators, one change at a time.

mutmut knows what a mutation is; where one would tell nothing, `exempt` says. A mutant that does
not compile is no mutant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import (
    mutation_operators,
    operator_arg_removal,
    operator_keywords,
    operator_swap_op,
)

from mutations.copies import PACKAGE_FOLDERS
from mutations.exempt import cast_value, exempt, exempt_file

Operator = Callable[[Any], Iterable[cst.CSTNode]]

_NARROWER: dict[Operator, tuple[type[cst.CSTNode], ...]] = {
    operator_keywords: (cst.BaseCompOp, cst.Break, cst.Continue),
    operator_swap_op: (
        *(cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation),
        *(cst.ComparisonTarget, cst.AugAssign),
    ),
}
# mutmut tries two of its operators on every node there is: half of all the time.
_OPERATORS = tuple((_NARROWER.get(each, kind), each) for kind, each in mutation_operators)
_BLANK = (cst.BaseParenthesizableWhitespace, cst.EmptyLine, cst.TrailingWhitespace, cst.Comma)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong version of a file: the line that is wrong, the text, and how it differs.

    A test has run it if it ran any of the lines `reached_by`, those of the whole statement.
    """

    source: str
    line: int
    reached_by: range
    text: str
    diff: str


@dataclass(frozen=True, slots=True)
class Place:
    """One change that can be made: its line, those of its statement, what takes whose place."""

    line: int
    statement: range
    old: cst.CSTNode
    new: cst.CSTNode


class _Finder(cst.CSTVisitor):
    """Collects the changes that mutmut proposes for each node that is not exempt."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []
        self._statements: list[range] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Collect the changes of one node; nothing below an exempt one is looked at."""
        if isinstance(node, _BLANK) or exempt(node):
            value = cast_value(node)
            if value is not None:
                value.visit(self)
            return False
        if isinstance(node, cst.SimpleStatementLine):
            self._statements.append(self._lines(node))
        for kind, operator in _OPERATORS:
            if isinstance(node, kind):
                self.places += (self._place(at, node, new) for at, new in _changes(node, operator))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Forget the statement that ends here."""
        if isinstance(original_node, cst.SimpleStatementLine):
            self._statements.pop()

    def _place(self, at: cst.CSTNode, old: cst.CSTNode, new: cst.CSTNode) -> Place:
        lines = self._lines(at)
        return Place(lines.start, self._statements[-1] if self._statements else lines, old, new)

    def _lines(self, node: cst.CSTNode) -> range:
        position = self.get_metadata(PositionProvider, node)
        assert isinstance(position, CodeRange)
        return range(position.start.line, position.end.line + 1)


class Places:
    """The changes that can be made in one source file."""

    def __init__(self, source: str, text: str) -> None:
        """Find them; `source` is the file's name from the root of the tree."""
        self._source = source
        self._text = text
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self._module = wrapper.module
        finder = _Finder()
        wrapper.visit(finder)
        self._by_line: dict[int, list[Place]] = {}
        for place in finder.places:
            self._by_line.setdefault(place.line, []).append(place)

    @property
    def lines(self) -> list[int]:
        """The lines on which something can be changed, in order."""
        return sorted(self._by_line)

    def mutants(self, line: int) -> list[Mutant]:
        """Return every mutant of one line, in the order of the operators."""
        mutants = (self.mutant(line, index) for index in range(self.count(line)))
        return [mutant for mutant in mutants if mutant is not None]

    def count(self, line: int) -> int:
        """Return how many changes one line offers, those that do not compile among them."""
        return len(self._by_line.get(line, ()))

    def mutant(self, line: int, index: int) -> Mutant | None:
        """Return what one change makes of the file; None where that does not compile."""
        return self._mutant(self._by_line[line][index])

    def _mutant(self, place: Place) -> Mutant | None:
        changed = self._module.deep_replace(place.old, place.new)
        assert isinstance(changed, cst.Module)
        text = changed.code
        try:
            compile(text, self._source, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
        lines = difflib.unified_diff(self._text.splitlines(), text.splitlines(), lineterm="", n=1)
        diff = "\n".join(list(lines)[2:])
        return Mutant(self._source, place.line, place.statement, text, diff) if diff else None


def _changes(node: cst.CSTNode, operator: Operator) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield what an operator makes of a node, each with the node that says where that is.

    A call of which one argument changes is changed where the argument is.
    """
    for new in operator(node):
        if operator is operator_arg_removal:
            assert isinstance(node, cst.Call)
            assert isinstance(new, cst.Call)
            pairs = zip(node.args, [*new.args, None], strict=False)
            argument = next(old for old, kept in pairs if old is not kept)
            if not exempt(argument) and not exempt(argument.value):
                yield argument, new
        else:
            yield node, new


def sources(root: Path) -> list[str]:
    """Return the names of the source files that may be mutated, in order."""
    files = (path for folder in PACKAGE_FOLDERS for path in sorted((root / folder).rglob("*.py")))
    names = (str(path.relative_to(root)) for path in files)
    return [name for name in names if not exempt_file(name)]
