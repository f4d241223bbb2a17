"""A grammar's language is what its characters say, whatever is gathered into lexemes."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind
from mlxd_worker.constraints.gbnf import read_grammar
from mlxd_worker.constraints.grammar_tree import (
    Chars,
    Choice,
    Item,
    Lexeme,
    Name,
    Repeat,
    Rules,
    Sequence,
)
from mlxd_worker.engine.masks.constraint import Constraint
from tests.support.constrained import accepts, compiled, demo_tokenizer

ALPHABET = "ab"
LENGTH_MAX = 6
WORDS = tuple(
    "".join(word)
    for length in range(LENGTH_MAX + 1)
    for word in itertools.product(ALPHABET, repeat=length)
)


def language(rules: Rules) -> frozenset[str]:
    """Return the short words of a grammar, by growing every rule until nothing is new."""
    known: dict[str, frozenset[str]] = dict.fromkeys(rules, frozenset())
    while True:
        grown = {name: _words(item, known) for name, item in rules.items()}
        if grown == known:
            return known["root"]
        known = grown


def _words(item: Item, known: dict[str, frozenset[str]]) -> frozenset[str]:
    match item:
        case Chars():
            inside = (low <= ord(c) <= high for c in ALPHABET for low, high in item.ranges)
            pairs = zip((c for c in ALPHABET for _ in item.ranges), inside, strict=True)
            return frozenset(c for c, is_in in pairs if is_in)
        case Name():
            return known[item.rule]
        case Sequence():
            parts = (_words(inner, known) for inner in item.items)
            return functools.reduce(_joined, parts, frozenset([""]))
        case Choice():
            return frozenset().union(*(_words(inner, known) for inner in item.items))
        case Repeat():
            return _repeated(_words(item.item, known), item.low, item.high)
        case Lexeme():
            raise AssertionError("only where a grammar is divided")


def _joined(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    return frozenset(a + b for a in first for b in second if len(a) + len(b) <= LENGTH_MAX)


def _repeated(words: frozenset[str], low: int, high: int | None) -> frozenset[str]:
    now = functools.reduce(_joined, [words] * low, frozenset([""]))
    found = set(now)
    for _ in range(low, LENGTH_MAX + 1 if high is None else high):
        now = _joined(now, words)
        found |= now
    return frozenset(found)


RULES = ("root", "x", "y")
atoms = st.sampled_from(['"a"', '"b"', '"ab"', '"aba"', "[ab]", "[b]", "x", "y", "root"])
items = st.builds(
    lambda atom, mark: atom + mark, atoms, st.sampled_from(["", "", "", "*", "+", "?", "{1,2}"])
)
sequences = st.lists(items, min_size=1, max_size=3).map(" ".join)
bodies = st.lists(sequences, min_size=1, max_size=3).map(" | ".join)
grammars = st.tuples(*[bodies] * len(RULES)).map(
    lambda found: "".join(f"{name} ::= {body}\n" for name, body in zip(RULES, found, strict=True))
)


@functools.cache
def _tokens() -> dict[str, list[int]]:
    return {word: demo_tokenizer().encode(word, begin_text=False) for word in WORDS}


def _complete(constraint: Constraint, token_ids: list[int]) -> bool:
    """Tell whether tokens are complete output; masks are not asked for, which is faster."""
    matcher = constraint.start()
    read = matcher.native.try_consume_tokens(token_ids)
    return read == len(token_ids) and matcher.native.is_accepting()


def _compiled(grammar: str) -> Constraint | None:
    """Return a grammar's constraint; None where texts are read in too many ways at once."""
    try:
        return compiled(FormatKind.EBNF_GRAMMAR, grammar)
    except InvalidRequest as error:
        if "Too many items" in str(error):
            return None
        raise


@settings(max_examples=40, deadline=None)
@given(grammar=grammars)
def test_a_grammar_accepts_its_words_and_no_others(grammar: str) -> None:
    """Every short word is accepted if, and only if, the rules can make it."""
    expected = language(read_grammar(grammar))
    assume(expected)
    constraint = _compiled(grammar)
    assume(constraint is not None)
    assert constraint is not None

    assert {word for word, ids in _tokens().items() if _complete(constraint, ids)} == expected


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "ab" "ce" | "abcd"', ["abce", "abcd"], ["ab", "abc"]),
        ('root ::= x "ce" | "abcd"\nx ::= "ab" | "(" x ")"', ["abce", "((ab))ce", "abcd"], ["abc"]),
        ("root ::= [a-z]* [a-c]", ["c", "zzc", "abc"], ["", "z"]),
        (
            'root ::= (item "," )* item\nitem ::= [0-9]+ | "[" root "]"',
            ["1,[2,3],45"],
            ["1,", "[]"],
        ),
        ("root ::= .{2}", ["é\n", "\U0001f600a"], ["a", "abc"]),
        ('root ::= "\\x41\\u00e9\\U0001F600" [^\\]\\-a]', ["Aé😀b"], ["Aé😀a", "Aé😀]", "Aé😀-"]),
        ("root ::= [a-]+ [\\[^]", ["a-[", "-^"], ["b["]),
        ('root ::= ( "a" # one\n | "b"\n )\n | "c"', ["a", "b", "c"], ["ab"]),
    ],
)
def test_longer_lexemes_lose_no_text(grammar: str, good: list[str], bad: list[str]) -> None:
    """What begins like another alternative, or contains its end, is read to its own end."""
    constraint = compiled(FormatKind.EBNF_GRAMMAR, grammar)

    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []
