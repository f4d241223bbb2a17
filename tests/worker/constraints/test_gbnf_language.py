"""A grammar's language is what its characters say, whatever is gathered into lexemes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind
from mlxd_worker.constraints.gbnf import GrammarError, to_lark
from mlxd_worker.engine.masks.constraint import Constraint
from tests.support.constrained import accepts, compile_format, demo_tokenizer

Known = dict[str, frozenset[str]]
ALPHABET = "ab"
LENGTH_MAX = 6
WORDS = tuple(
    "".join(word)
    for length in range(LENGTH_MAX + 1)
    for word in itertools.product(ALPHABET, repeat=length)
)


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a grammar: as it is written, and the short words that it stands for."""

    text: str
    words: Callable[[Known], frozenset[str]]


def language(bodies: Mapping[str, Item]) -> frozenset[str]:
    """Return the short words of a grammar, by growing every rule until nothing is new."""
    known: Known = dict.fromkeys(bodies, frozenset())
    while True:
        grown = {name: body.words(known) for name, body in bodies.items()}
        if grown == known:
            return known["root"]
        known = grown


def _leaf(text: str) -> Item:
    """Return an item of a literal, a class or a rule's name."""
    match text[0]:
        case '"':
            return Item(text, lambda _: frozenset([text[1:-1]]))
        case "[":
            return Item(text, lambda _: frozenset(text[1:-1]))
    return Item(text, lambda known: known[text])


def _mark(item: Item, mark: str) -> Item:
    """Return an item with what stands behind it."""
    low, high = {"": (1, 1), "*": (0, None), "+": (1, None), "?": (0, 1), "{1,2}": (1, 2)}[mark]
    return Item(item.text + mark, lambda known: _repeat(item.words(known), low, high))


def _sequence(items: list[Item]) -> Item:
    return Item(
        " ".join(item.text for item in items),
        lambda known: functools.reduce(
            _join, (item.words(known) for item in items), frozenset([""])
        ),
    )


def _choice(options: list[Item]) -> Item:
    return Item(
        " | ".join(option.text for option in options),
        lambda known: frozenset().union(*(option.words(known) for option in options)),
    )


def _join(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    return frozenset(a + b for a in first for b in second if len(a) + len(b) <= LENGTH_MAX)


def _repeat(words: frozenset[str], low: int, high: int | None) -> frozenset[str]:
    now = functools.reduce(_join, [words] * low, frozenset([""]))
    result = set(now)
    for _ in range(low, LENGTH_MAX + 1 if high is None else high):
        now = _join(now, words)
        result |= now
    return frozenset(result)


RULES = ("root", "x", "y")
atoms = st.sampled_from(['"a"', '"b"', '"ab"', '"aba"', "[ab]", "[b]", "x", "y", "root"]).map(_leaf)
items = st.builds(_mark, atoms, st.sampled_from(["", "", "", "*", "+", "?", "{1,2}"]))
sequences = st.lists(items, min_size=1, max_size=3).map(_sequence)
bodies = st.lists(sequences, min_size=1, max_size=3).map(_choice)
grammars = st.fixed_dictionaries(dict.fromkeys(RULES, bodies))


@functools.cache
def _tokens() -> dict[str, list[int]]:
    return {word: demo_tokenizer().encode(word, begin_text=False) for word in WORDS}


def _complete(constraint: Constraint, token_ids: list[int]) -> bool:
    """Tell whether tokens are complete output; masks are not asked for, which is faster."""
    matcher = constraint.start()
    read = matcher.native.try_consume_tokens(token_ids)
    return read == len(token_ids) and matcher.native.is_accepting()


def _compile(grammar: str) -> Constraint | None:
    """Return a grammar's constraint; None where texts are read in too many ways at once."""
    try:
        return compile_format(FormatKind.EBNF_GRAMMAR, grammar)
    except InvalidRequest as error:
        if "Too many items" in str(error):
            return None
        raise


@settings(max_examples=40, deadline=None)
@given(grammar=grammars)
def test_a_grammar_accepts_its_words_and_no_others(grammar: dict[str, Item]) -> None:
    """Every short word is accepted if, and only if, the rules can make it."""
    expected = language(grammar)
    assume(expected)
    constraint = _compile("".join(f"{name} ::= {body.text}\n" for name, body in grammar.items()))
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
        ('root ::= word "c"\nword ::= [a-z]+', ["abc", "ccc"], ["c", "ab"]),
        ('root ::= "(" root ")" | word "c"\nword ::= [a-z]+', ["abc", "(ccc)"], ["c", "(ab)"]),
        ('root ::= "" | "a" root "b"', ["", "ab", "aabb"], ["a", "aab"]),
        ('root ::= [^a]{2,} "a"{0,1}', ["bb", "b\nba"], ["b", "bab"]),
        ('root ::= "a" ("b" root){0,0} "c"{0}', ["a"], ["aba", "ac"]),
    ],
)
def test_longer_lexemes_lose_no_text(grammar: str, good: list[str], bad: list[str]) -> None:
    """What begins like another alternative, or contains its end, is read to its own end."""
    constraint = compile_format(FormatKind.EBNF_GRAMMAR, grammar)

    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('root ::= "a', "1:10: '\"' is not closed on its line"),
        ("root ::= [a", "1:10: '[' is not closed on its line"),
        ('root = "a"', "1:6: '::=' is needed after a rule's name"),
        ('root ::= "a"\n ::= "b"', "2:2: a rule's name is needed"),
        ('root ::= "a"\nroot ::= "b"', "2:1: the rule 'root' is there already"),
        ('root ::= ("a"', "1:14: ')' is needed here"),
        ('root ::= "a")', "1:13: ')' does not belong here"),
        ('root ::= "a"{x}', "1:13: '{' does not belong here"),
        ('root ::= "a"{3,2}', "1:13: 2 is below 3"),
        ('root ::= "a"{2001}', "1:13: more than 2000 repetitions"),
        (r'root ::= "\q"', r"1:11: an unknown escape \q"),
        (r'root ::= "\ud800"', "1:11: '\\\\ud800' is not the number of a character"),
        ("root ::= []", "1:10: a class without any character"),
        ("root ::= [b-a]", "1:10: a range that ends before it begins"),
        ('x ::= "a"', "1:1: there is no rule 'root', where a text begins"),
        ("root ::= " + "(" * 64 + '"a"' + ")" * 64, "groups more than 64 deep"),
        ("root ::= " + '"' + "a" * 50_001 + '"', "more than 50000 items"),
        ("".join(f'r{i} ::= "a"\n' for i in range(2001)), "2001:1: more than 2000 rules"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_is_told_with_its_place(grammar: str, problem: str) -> None:
    """Line and column, from 1; nothing is guessed."""
    with pytest.raises(GrammarError) as caught:
        to_lark(grammar)

    assert problem in str(caught.value)
