"""Expressions mean what ECMA-262 says, judged by an engine of it."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind
from mlxd_worker.constraints.patterns import (
    PATTERN_CHARS_MAX,
    PatternError,
    search_pattern,
    whole_pattern,
)
from tests.support.constrained import accepts, compile_format, schema
from tests.support.ecma import finds, written_found, written_matches

TEXTS = (
    "", "a", "b", "ab", "ba", "aab", "abab", "-", "]", "^", "a-b", "A1_", "é", " ", "\t", "\n",
    "a\nb", "\u00a0", "\ufeff", "\u2028", "\U0001f600", "$", "{", "a{2}", "/", "\\", "0", "9a",
)  # fmt: skip
atoms = st.sampled_from(
    ["a", "b", "ab", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\W", r"[\w-]", r"[a\d-]", "-", "é",
     r"\u00e9", r"\n", r"\/", r"\-", "(?:a|b)", "(ab|)", "(?<n>a)", r"[\]^]", r"\u{1f600}", r"\$",
     '[^"]', r"[^\\]", r'[\S"]', "(^a|b)", "(a$|b)", "[a-c-e]", "[^]", "[[a]", "[a&&b]", r"[\b]"]
)  # fmt: skip
marks = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "*?", "{0,}"])
sequences = st.lists(st.builds("{}{}".format, atoms, marks), max_size=3).map("".join)
whole = st.builds(
    "{}{}{}".format, st.sampled_from(["", "^"]), sequences, st.sampled_from(["", "$"])
)
patterns = st.lists(whole, min_size=1, max_size=3).map("|".join)


@settings(max_examples=60, deadline=None)
@given(pattern=patterns)
def test_an_expression_is_found_where_the_language_says(pattern: str) -> None:
    """Searched for, as a schema means it, and matched as a whole, as `regex` does."""
    try:
        searched, matched = search_pattern(pattern), whole_pattern(pattern)
    except PatternError as error:
        assert "^ " in str(error) or "nothing to repeat" in str(error)  # noqa: PT017 - one of many
        return
    for text in TEXTS:
        assert written_found(searched, text) == finds(pattern, text), text
        assert written_matches(matched, text) == finds(f"^(?:{pattern})$", text), text


EXPRESSIONS = (
    r"^[\w.-]+@\w+$", "a.c", r"[^\s\d]{2,}", r"^(é|\u{1f600})+$", '^[^"]*$', r"^[^\\]+$",
    r"(^$)|(^a.$)", r"^[\x00-\x1f]+$", r"[^a-z]{2,3}", r"\p{Lu}", "^[^]?$", r"^\P{P}+$",
    r"^\p{C}$",
)  # fmt: skip


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_the_library_reads_what_is_written(pattern: str) -> None:
    """A compiled expression accepts the texts that the language's own engine matches."""
    constraint = compile_format(FormatKind.REGEX, pattern)
    strings = schema(json.dumps({"type": "string", "pattern": pattern}))
    for text in (*TEXTS, "a.b@c", "abc", "éé", "é\U0001f600", 'a"', '"', "\\\\"):
        assert accepts(constraint, text) == finds(f"^(?:{pattern})$", text), text
        assert accepts(strings, json.dumps(text, ensure_ascii=False)) == finds(pattern, text), text


@pytest.mark.parametrize("pattern", [r"a\x01b", r"a[\x01\x7f]?b", r"a[\x7f]b"])
def test_what_no_string_spells_is_in_none(pattern: str) -> None:
    """A character that only `\\u` spells is refused, or left out of a class: never of a text."""
    with contextlib.suppress(InvalidRequest):
        constraint = schema(json.dumps({"type": "string", "pattern": f"^{pattern}$"}))
        assert accepts(constraint, '"ab"') == ("?" in pattern)
        assert not accepts(constraint, '"a\\u0001b"')


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a(?=b)", "look-ahead is not served, at character 2"),
        ("(?<!a)b", "look-behind is not served, at character 1"),
        (r"(a)\1", r"back references are not served, at character 4"),
        (r"\bword", "word boundaries are not served, at character 1"),
        ("(a", "a group that is not closed, at character 1"),
        ("a)", "a ) that closes nothing, at character 2"),
        ("[a", "a class that is not closed, at character 1"),
        ("[]", "a class without any character, at character 1"),
        ("[b-a]", "ends before it begins, at character 3"),
        ("a**", "nothing to repeat, at character 3"),
        ("+a", "nothing to repeat, at character 1"),
        ("a{3,2}", "2 is below 3, at character 2"),
        ("a{999999}", "more than 100000 repetitions, at character 2"),
        (r"\Z", r"an unknown escape \Z, at character 1"),
        (r"\p{Script=Greek}", "is not served, at character 1"),
        (r"a\x01", "a control character, which no output has, at character 2"),
        ("(a$)+", "nothing to repeat, at character 5"),
        (r"\ud800", "half of a pair, which no text holds, at character 1"),
        ("(?i)a", "a group of an unknown kind, at character 1"),
        ("a^b", "^ and $ are served where a text begins and ends"),
        ("(" * 101 + ")" * 101, "groups more than 100 deep"),
        ("a" * (PATTERN_CHARS_MAX + 1), "more than 65536 characters"),
    ],
)
def test_what_is_not_served_is_told_with_its_place(pattern: str, problem: str) -> None:
    """An expression is refused by name and place; nothing is guessed."""
    with pytest.raises(PatternError) as caught:
        search_pattern(pattern)

    assert problem in str(caught.value)


def test_categories_are_read() -> None:
    r"""\p{L} is every letter, \P{L} everything else."""
    assert written_matches(whole_pattern(r"\p{Lu}"), "É")
    assert not written_matches(whole_pattern(r"\p{Lu}"), "é")
    assert not written_matches(whole_pattern(r"\P{Lu}"), "É")
    assert written_matches(whole_pattern(r"[\P{Lu}É]"), "É")
