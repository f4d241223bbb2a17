"""Stop strings in a stream: what is sent is exactly what a search of the whole text would leave."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxd_worker.engine.text import Piece, StopMatcher, TextStream

ALPHABET = "abé🙂"


class TableDecoder:
    """A decoder whose ids index a table of texts; the tail comes when the stream is over."""

    def __init__(self, table: list[str], tail: str = "") -> None:
        self._table = table
        self._tail = tail

    def push(self, token_id: int) -> str:
        """Return the table's text."""
        return self._table[token_id]

    def finish(self) -> str:
        """Return the tail, once."""
        tail, self._tail = self._tail, ""
        return tail


def naive_cut(text: str, stops: tuple[str, ...]) -> Piece:
    """Look at every end in turn; the first where a stop string ends wins, there the longest."""
    cuts = (naive_cut_at(text, end, stops) for end in range(1, len(text) + 1))
    return next((cut for cut in cuts if cut is not None), Piece(text))


def naive_cut_at(text: str, end: int, stops: tuple[str, ...]) -> Piece | None:
    """Return the text before the longest stop string that ends here, if one does."""
    ends = [stop for stop in stops if text[:end].endswith(stop)]
    if not ends:
        return None
    stop = max(ends, key=len)
    return Piece(text[: end - len(stop)], stop)


def run(pieces: list[str], stops: tuple[str, ...], tail: str = "") -> tuple[list[Piece], Piece]:
    """Stream the pieces; return what each gave, and all of it as one piece."""
    stream = TextStream(TableDecoder(pieces, tail), stops)
    pushed: list[Piece] = []
    for token_id in range(len(pieces)):
        pushed.append(stream.push(token_id))
        if pushed[-1].stop is not None:
            break
    else:
        pushed.append(stream.finish())
    return pushed, Piece("".join(piece.text for piece in pushed), pushed[-1].stop)


words = st.text(ALPHABET, min_size=1, max_size=5)


@given(
    pieces=st.lists(st.text(ALPHABET, max_size=6), max_size=20),
    tail=st.text(ALPHABET, max_size=3),
    stops=st.lists(words, max_size=5).map(tuple),
)
@example(pieces=["a", "b", "a", "b", "b"], tail="", stops=("abb",))
@example(pieces=["aab", "aa", "b"], tail="a", stops=("aabaaa", "baa"))
@example(pieces=["b", "b"], tail="é", stops=("bbé",))
def test_any_split_gives_what_the_whole_text_gives(
    pieces: list[str], tail: str, stops: tuple[str, ...]
) -> None:
    """However a text is split, what is sent is the text before the first stop string completed."""
    _, whole = run(pieces, stops, tail)
    assert whole == naive_cut("".join(pieces) + tail, stops)


@given(
    early=st.lists(st.text(ALPHABET, max_size=6), max_size=8),
    later=st.lists(st.text(ALPHABET, max_size=6), max_size=8),
    stops=st.lists(words, min_size=1, max_size=5).map(tuple),
)
@example(early=["ab"], later=["b"], stops=("ab", "abb"))
@example(early=["ab", "a"], later=["b"], stops=("ab",))
def test_a_stop_string_counts_from_where_it_may(
    early: list[str], later: list[str], stops: tuple[str, ...]
) -> None:
    """One that ends too early is text; the first that ends later counts, wherever it began."""
    stream = TextStream(TableDecoder([*early, *later]), stops)
    pieces = [stream.push(token_id, may_end=False) for token_id in range(len(early))]
    for token_id in range(len(early), len(early) + len(later)):
        pieces.append(stream.push(token_id))
        if pieces[-1].stop is not None:
            break
    else:
        pieces.append(stream.finish())

    text, too_early = "".join([*early, *later]), len("".join(early))
    ends = range(too_early + 1, len(text) + 1)
    cuts = (naive_cut_at(text, end, stops) for end in ends)
    expected = next((cut for cut in cuts if cut is not None), Piece(text))
    assert Piece("".join(piece.text for piece in pieces), pieces[-1].stop) == expected


@given(
    pieces=st.lists(st.text(ALPHABET, max_size=6), max_size=20),
    stops=st.lists(words, min_size=1, max_size=5).map(tuple),
)
def test_exactly_what_may_become_a_stop_string_is_held(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    """After each piece the text kept back is the longest suffix that begins some stop string."""
    given_pieces, _ = run(pieces, stops)
    text = sent = ""
    for piece, given_piece in zip(pieces, given_pieces, strict=False):
        text, sent = text + piece, sent + given_piece.text
        if given_piece.stop is not None:
            break
        starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((len(start) for start in starts if text.endswith(start)), default=0)
        assert sent == text[: len(text) - longest]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld"], (), Piece("Hello world")),
        (["one\nUs", "er: two"], ("\nUser:",), Piece("one", "\nUser:")),
        (["one\nUs", "ed"], ("\nUser:",), Piece("one\nUsed")),
        (["x", "END"], ("END", "ND"), Piece("x", "END")),
        (["a\n", "\nb"], ("\n\n", "\n"), Piece("a", "\n")),
        (["two stops: first STOP then HALT"], ("HALT", "STOP"), Piece("two stops: first ", "STOP")),
        (["日本", "語で"], ("本語",), Piece("日", "本語")),
        (["flag 🇯", "🇵"], ("🇯🇵",), Piece("flag ", "🇯🇵")),
        (["e\u0301"], ("é",), Piece("e\u0301")),
        (["stop"], ("stop",), Piece("", "stop")),
    ],
)
def test_cases_by_hand(pieces: list[str], stops: tuple[str, ...], expected: Piece) -> None:
    """Stop strings across tokens, several of them, none, and in other scripts."""
    assert run(pieces, stops)[1] == expected


def test_a_stop_string_may_end_in_the_tail() -> None:
    """Characters that only the end of the stream sets free can still complete a stop string."""
    assert run(["text ST"], ("STOP",), tail="OP")[1] == Piece("text ", "STOP")
    assert run(["text ST"], ("STOP",), tail="O")[1] == Piece("text STO")


def test_text_without_stop_strings_is_never_held() -> None:
    """A stream that asks for no stop strings gets each piece at once."""
    assert run(["a", "", "b"], ())[0] == [Piece("a"), Piece(""), Piece("b"), Piece("")]


def test_a_stream_that_is_over_takes_nothing() -> None:
    """Pushing after the end is a bug and is said to be one."""
    stream = TextStream(TableDecoder(["stop"]), ("stop",))
    assert stream.push(0).stop == "stop"
    with pytest.raises(AssertionError, match="over"):
        stream.push(0)
    with pytest.raises(AssertionError, match="over"):
        stream.finish()


def test_an_empty_stop_string_is_a_bug() -> None:
    """An empty stop string would end every stream; requests with one are refused before this."""
    with pytest.raises(AssertionError, match="empty"):
        StopMatcher(("a", ""))


def test_hostile_stop_strings_cost_no_more_than_the_text() -> None:
    """Stop strings that nearly match everywhere hold back no more than their own length."""
    stops = tuple("a" * 200 + end for end in "bcdefghij")
    pieces = ["a" * 10] * 300
    given_pieces, whole = run(pieces, stops)
    assert whole == Piece("a" * 3000)
    assert sum(len(piece.text) for piece in given_pieces[:-1]) == 3000 - 200
