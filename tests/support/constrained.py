"""Constraints on the demo model's vocabulary, and what texts they accept."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer

TRIES_MAX = 20_000
DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"


@functools.cache
def demo_tokenizer() -> Tokenizer:
    """Return the demo model's tokenizer: byte-level, so every text can be written."""
    return load_tokenizer(DEMO)


@functools.cache
def demo_constraints() -> Constraints:
    """Return the constraints of the demo model."""
    tokenizer = demo_tokenizer()
    return Constraints(tokenizer, tokenizer.vocab_size)


def compile_format(
    kind: FormatKind, text: str = "", *, choices: tuple[str, ...] = ()
) -> Constraint:
    """Return a format compiled for the demo model."""
    return demo_constraints().compile(ResponseFormat(kind, text, choices))


def schema(text: str) -> Constraint:
    """Return a JSON schema compiled for the demo model."""
    return compile_format(FormatKind.JSON_SCHEMA, text)


def accepts_ordered(constraint: Constraint, value: Any) -> bool:
    """Tell whether a value is complete output with the members of its objects in some order.

    Orders are looked for until `TRIES_MAX` parts have been tried; then it is no.
    """
    tried = _Orders().write(constraint.prototype, value)
    return any(matcher.is_accepting() for matcher in tried)


def _name(name: str, begin: str) -> str:
    return f"{begin}{json.dumps(name, ensure_ascii=False)}: "


class _Orders:
    """Writes one value in all orders that a matcher takes, part by part."""

    def __init__(self) -> None:
        self._left = TRIES_MAX

    def write(self, matcher: LLMatcher, value: Any) -> Iterator[LLMatcher]:
        """Yield the matcher behind a value, for each order of members that it takes."""
        match value:
            case dict():
                begun = self._after(matcher, "{")
                inner = self._members(begun, list(value.items()), begin="")
                yield from self._close(inner, "}")
            case list():
                inner = self._items(self._after(matcher, "["), value, begin="")
                yield from self._close(inner, "]")
            case _:
                yield from self._after(matcher, json.dumps(value, ensure_ascii=False))

    def _members(
        self, matchers: Iterable[LLMatcher], left: list[tuple[str, Any]], *, begin: str
    ) -> Iterator[LLMatcher]:
        for matcher in matchers:
            if not left:
                yield matcher
            for behind, rest in self._ways(matcher, left, begin):
                yield from self._members(behind, rest, begin=", ")

    def _ways(
        self, matcher: LLMatcher, left: list[tuple[str, Any]], begin: str
    ) -> list[tuple[list[LLMatcher], list[tuple[str, Any]]]]:
        """Return the members that may come next, those first that leave others possible."""
        now = {name for name, _ in left if self._takes(matcher, _name(name, begin))}
        ways = []
        for index, (name, value) in enumerate(left):
            if name not in now:
                continue
            behind = [
                m
                for after in self._after(matcher, _name(name, begin))
                for m in self.write(after, value)
            ]
            if behind:
                others = now - {name}
                lost = sum(not any(self._takes(m, _name(n, ", ")) for m in behind) for n in others)
                ways.append((lost, index, behind, [*left[:index], *left[index + 1 :]]))
                if lost == 0:
                    break
        return [(behind, rest) for _, _, behind, rest in sorted(ways, key=lambda way: way[:2])]

    def _items(
        self, matchers: Iterable[LLMatcher], left: list[Any], *, begin: str
    ) -> Iterator[LLMatcher]:
        for matcher in matchers:
            if not left:
                yield matcher
                continue
            for after in self._after(matcher, begin):
                yield from self._items(self.write(after, left[0]), left[1:], begin=", ")

    def _close(self, matchers: Iterable[LLMatcher], end: str) -> Iterator[LLMatcher]:
        for matcher in matchers:
            yield from self._after(matcher, end)

    def _takes(self, matcher: LLMatcher, text: str) -> bool:
        return any(True for _ in self._after(matcher, text))

    def _after(self, matcher: LLMatcher, text: str) -> Iterator[LLMatcher]:
        """Yield a copy of the matcher behind a text, where it is taken."""
        self._left -= 1
        ids = demo_tokenizer().encode(text, begin_text=False)
        copy = matcher.deep_copy()
        if self._left > 0 and copy.try_consume_tokens(ids) == len(ids):
            yield copy


def accepts(constraint: Constraint, text: str) -> bool:
    """Tell whether a text is complete output, token by token, each of them in its mask."""
    matcher = constraint.start()
    for token_id in demo_tokenizer().encode(text, begin_text=False):
        mask = matcher.mask()
        if not mask[token_id >> 3] >> (token_id & 7) & 1:
            return False
        matcher.accept(token_id)
    return matcher.native.is_accepting()
