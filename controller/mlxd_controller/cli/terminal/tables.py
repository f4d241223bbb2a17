"""Columns of text within a width: what has no room goes as a whole column, and no word is broken.

Pure. A width is counted in cells of a terminal, of which some characters take two.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len

GAP = "  "
_ELLIPSIS = "…"
WRAPPED_CELLS_MIN = 16
"""A column is made no narrower than this; rather its lines are longer than the terminal's."""


def lay_out(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    width: int | None,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
    shortens: bool = False,
) -> list[str]:
    """Return the lines of a table, the one of its headings first, without trailing blanks.

    width: of the terminal; None has room for everything. right: columns that are aligned to the
    right. spare: columns that may be left out, the first one first. Where the rest has no room
    either, the widest column is wrapped between words. shortens: whether a word with too little
    room there loses its middle; else it stays whole, and its line is too long.
    """
    grid = [tuple(column.upper() for column in columns), *map(tuple, rows)]
    widths = {
        column: max(map(_cells, (row[place] for row in grid)))
        for place, column in enumerate(columns)
    }
    for column in spare:
        if width is None or _sum(widths) <= width:
            break
        del widths[column]
    if width is not None and _sum(widths) > width:
        widest = max((c for c in widths if c not in right), key=widths.__getitem__)
        rest = _sum(widths) - widths[widest]
        widths[widest] = max(width - rest, WRAPPED_CELLS_MIN)
    lines = []
    for row in grid:
        cells = dict(zip(columns, row, strict=True))
        parts = [_wrap(cells[column], widths[column], shortens=shortens) for column in widths]
        for line in zip_longest(*parts, fillvalue=""):
            padded = (
                _pad(text, widths[column], right=column in right)
                for column, text in zip(widths, line, strict=True)
            )
            lines.append(GAP.join(padded).rstrip())
    return lines


def _sum(widths: dict[str, int]) -> int:
    return sum(widths.values()) + len(GAP) * (len(widths) - 1)


def _cells(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def shorten(text: str, cells: int) -> str:
    """Return a text in at most so many cells; what is left out of its middle is an ellipsis."""
    if cell_len(text) <= cells:
        return text
    begin, end = text[: len(text) // 2], text[len(text) // 2 :]
    while (begin or end) and cell_len(begin) + 1 + cell_len(end) > cells:
        if len(end) > len(begin):
            end = end[1:]
        else:
            begin = begin[:-1]
    return f"{begin}{_ELLIPSIS}{end}" if cells > 1 else _ELLIPSIS[:cells]


def _wrap(text: str, width: int, *, shortens: bool) -> list[str]:
    """Return the lines of a cell; a word that is wider than `width` is shortened, or whole."""
    lines: list[str] = []
    for line in text.splitlines():
        if cell_len(line) <= width:
            lines.append(line)
            continue
        wrapped = textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
        lines += [shorten(part, width) for part in wrapped] if shortens else wrapped
    return lines


def _pad(text: str, width: int, *, right: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks
