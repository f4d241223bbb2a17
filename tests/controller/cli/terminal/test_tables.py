"""Columns of text within a terminal's width."""

from __future__ import annotations

from rich.cells import cell_len

from mlxd_controller.cli.terminal.tables import lay_out, shorten

COLUMNS = ("name", "size", "path")
ROWS = [("demo, tiny", "12 MiB", "/models/demo"), ("日本", "3 MiB", "/x")]


def test_a_table_takes_what_it_needs() -> None:
    """Where nobody sees it, and where it has room; characters of two cells count as two."""
    whole = [
        "NAME          SIZE  PATH",
        "demo, tiny  12 MiB  /models/demo",
        "日本         3 MiB  /x",
    ]

    assert lay_out(COLUMNS, ROWS, width=None, right=("size",), spare=("path",)) == whole
    assert lay_out(COLUMNS, ROWS, width=32, right=("size",), spare=("path",)) == whole


def test_columns_go_in_the_order_that_is_said() -> None:
    """No more of them than must."""
    assert lay_out(COLUMNS, ROWS[:1], width=31, spare=("path", "size")) == [
        "NAME        SIZE",
        "demo, tiny  12 MiB",
    ]
    assert lay_out(COLUMNS, ROWS[:1], width=10, spare=("path", "size")) == ["NAME", "demo, tiny"]


def test_the_widest_column_is_wrapped_between_words() -> None:
    """Where all that may go has gone; a word that is wider than that stays whole."""
    lines = lay_out(("a", "b"), [("x", "one two three four five"), ("y", "z" * 24)], width=20)

    assert lines == ["A  B", "x  one two three", "   four five", f"y  {'z' * 24}"]


def test_a_name_is_shortened_in_its_middle() -> None:
    """Both ends tell one from another."""
    assert shorten("organisation/model-7b", 11) == "organ…el-7b"
    assert shorten("short", 5) == "short"
    assert [cell_len(shorten("二三四五六", cells)) <= cells for cells in range(11)] == [True] * 11


def test_a_word_without_room_loses_its_middle_where_that_may_be() -> None:
    """Then no line is wider than the terminal; else the word is whole, to be copied."""
    rows = [("organisation/a-name-of-some-length", "loading 50%")]
    short = lay_out(("name", "state"), rows, width=40, shortens=True)
    whole = lay_out(("name", "state"), rows, width=40)
    assert max(map(cell_len, short)) <= 40
    assert short[1].endswith("loading 50%")
    assert rows[0][0] in whole[1]
