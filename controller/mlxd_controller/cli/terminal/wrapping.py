"""Text that streams, in lines between whose words a terminal of some width breaks.

Pure. A word is held back until its end has come, or until it is as wide as a line: it is broken
only then. Blanks at a break go.
"""

from __future__ import annotations

import re

from rich.cells import cell_len

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


class Wrapping:
    """Takes a text piece by piece, and gives it back with line ends between words."""

    def __init__(self, width: int) -> None:
        """Break lines at `width` cells; 0 breaks none."""
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""
        self._is_wide = False
        """Whether the beginning of a word that is too wide is written already."""

    def add(self, text: str) -> str:
        """Return what can be written, once `text` has come."""
        if not self._width:
            return text
        written = []
        for piece in _PIECES.findall(text):
            if not piece.isspace():
                self._word += piece
                if self._is_wide or cell_len(self._word) >= self._width:
                    written.append(self._put_word())
                    self._is_wide = True
                continue
            written.append(self._put_word())
            self._is_wide = False
            if piece == "\n":
                written.append(piece)
                self._column, self._blanks = 0, ""
            else:
                self._blanks += piece.expandtabs(4)
        return "".join(written)

    def end(self) -> str:
        """Return what was held back; the next text begins on a line of its own."""
        rest = self._put_word()
        self._column, self._blanks, self._is_wide = 0, "", False
        return rest

    def _put_word(self) -> str:
        if not self._word:
            return ""
        cells = cell_len(self._blanks) + cell_len(self._word)
        if not self._is_wide and self._column and self._column + cells > self._width:
            written, self._column = f"\n{self._word}", cell_len(self._word)
        else:
            written, self._column = self._blanks + self._word, self._column + cells
        self._word, self._blanks = "", ""
        if self._column > self._width:  # of a word that the terminal itself breaks
            self._column = self._column % self._width or self._width
        return written
