"""Lines of an answer end between words, however the text comes in pieces."""

from __future__ import annotations

import random
import textwrap

import pytest
from rich.cells import cell_len

from mlxd_controller.cli.terminal.wrapping import Wrapping

TEXT = (
    "Once upon a time there was a king who had an extraordinarily long-winded adviser.\n\n"
    "  He said:  \u4e8c\u4e09\u56db \u4e94\u516d, and no more.\n"
)


def wrap(*pieces: str, width: int = 20) -> str:
    """What is written of a text that comes in these pieces."""
    wrapping = Wrapping(width)
    return "".join([*(wrapping.add(piece) for piece in pieces), wrapping.end()])


@pytest.mark.parametrize("seed", range(20))
def test_pieces_make_no_difference(seed: int) -> None:
    """Cut anywhere, the lines are the same; none is too wide, and no word is broken or lost."""
    draws = random.Random(seed)
    pieces, rest = [], TEXT
    while rest:
        size = draws.randint(1, 7)
        pieces.append(rest[:size])
        rest = rest[size:]
    written = wrap(*pieces)

    assert written == wrap(TEXT)
    assert max(map(cell_len, written.splitlines())) <= 20
    assert written.split() == TEXT.split()


def test_plain_words_are_wrapped_as_everybody_does() -> None:
    """As the standard library would, which has no pieces."""
    line = TEXT.splitlines()[0]
    assert wrap(line).splitlines() == textwrap.wrap(line, 20, break_on_hyphens=False)
    assert wrap("a b\nc") == "a b\nc"
    assert wrap("  indented") == "  indented"


def test_a_word_wider_than_a_line_is_not_held_back_for_ever() -> None:
    """What the terminal itself breaks it may: an answer without a blank is seen as it comes."""
    wrapping = Wrapping(10)
    assert wrapping.add("x" * 9) == ""
    assert wrapping.add("x") == "x" * 10
    assert wrapping.add("x" * 5) == "x" * 5
    assert wrapping.add(" y") + wrapping.end() == " y"
    assert wrap("a ", "x" * 25, " yyy", width=10) == "a\n" + "x" * 25 + " yyy"
    assert wrap("x" * 25 + " yyy", width=10) == "x" * 25 + " yyy"
    assert wrap("x" * 25 + " yyyyyy", width=10) == "x" * 25 + "\nyyyyyy"


def test_without_a_width_a_text_is_as_it_is() -> None:
    """At once, whatever it is."""
    assert Wrapping(0).add(TEXT) == TEXT
