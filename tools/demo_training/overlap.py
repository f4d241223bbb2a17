"""Find training text that repeats held-out text.

Two looks are taken. The exact look finds every run of 200 characters that also stands in a
held-out story. The loose look compares letters and digits alone, lower-cased, in runs of 150,
so that another edition's line breaks, quotes or capitals hide nothing.

Runs are compared by a 64-bit rolling hash, computed for every position at once. A false match
(about one in a million corpora) would only cost a paragraph of training text.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

SPAN_CHARS = 200
SPAN_LETTERS = 150

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_CODE_POINTS = 0x110000
_FOLDED_BELOW = 0x3000  # every script the corpus writes in; above it nothing counts as a letter

Codes = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeldOutSpans:
    """The hashes of every run of held-out text, sorted, for both looks."""

    exact: Hashes
    loose: Hashes

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Collect the runs of `texts`."""
        exact: list[Hashes] = []
        loose: list[Hashes] = []
        for text in texts:
            codes = _codes(text)
            exact.append(run_hashes(codes, SPAN_CHARS))
            loose.append(run_hashes(_letters(codes)[0], SPAN_LETTERS))
        return cls(np.unique(np.concatenate(exact)), np.unique(np.concatenate(loose)))

    def shared_chars(self, text: str) -> list[tuple[int, int]]:
        """Return the half-open character ranges of `text` that repeat held-out text, sorted."""
        codes = _codes(text)
        letters, positions = _letters(codes)
        touched = np.zeros(len(codes) + 1, np.int64)
        for start in np.flatnonzero(_is_among(run_hashes(codes, SPAN_CHARS), self.exact)):
            touched[start] += 1
            touched[start + SPAN_CHARS] -= 1
        for start in np.flatnonzero(_is_among(run_hashes(letters, SPAN_LETTERS), self.loose)):
            touched[positions[start]] += 1
            touched[positions[start + SPAN_LETTERS - 1] + 1] -= 1
        return _ranges(np.cumsum(touched) > 0)


def run_hashes(codes: Codes, length: int) -> Hashes:
    """Return one hash for each run of `length` codes; empty where the text is shorter.

    The hash of a run is sum(mix(code_j) * base**j) over it, brought back to power zero, so equal
    runs hash alike wherever they stand. Arithmetic is modulo 2**64.
    """
    count = len(codes) - length + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    powers = _powers(_BASE, len(codes))
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(_mix(codes) * powers, out=sums[1:])
    inverse = _powers(pow(_BASE, -1, 1 << 64), count)
    return (sums[length:] - sums[:count]) * inverse


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def _mix(codes: Codes) -> Hashes:
    """Spread each code over 64 bits (the finaliser of splitmix64)."""
    mixed = (codes.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _codes(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _folding() -> Codes:
    """Return, by code point, the lower-case letter or digit it stands for, or 0."""
    table = np.zeros(_CODE_POINTS, np.uint32)
    for code in range(_FOLDED_BELOW):
        if chr(code).isalnum():
            table[code] = ord(chr(code).lower()[0])
    return table


_FOLDED = _folding()


def _letters(codes: Codes) -> tuple[Codes, Positions]:
    """Return the folded letters and digits of a text, and where each stood."""
    folded = _FOLDED[codes]
    positions = np.flatnonzero(folded)
    return folded[positions], positions


def _is_among(hashes: Hashes, among: Hashes) -> npt.NDArray[np.bool_]:
    if len(among) == 0:
        return np.zeros(len(hashes), np.bool_)
    places = np.minimum(np.searchsorted(among, hashes), len(among) - 1)
    matches: npt.NDArray[np.bool_] = among[places] == hashes
    return matches


def _ranges(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(edges[i]), int(edges[i + 1])) for i in range(0, len(edges), 2)]
