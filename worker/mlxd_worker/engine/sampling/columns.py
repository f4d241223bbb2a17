"""What rows ask for when they draw, as columns: made anew only where the rows are others.

Invariants:
- What changes from token to token (positions, masks, penalties) is in no column.
- Columns belong to rows in their order: the same options, object by object, are the same rows' for
  all that a draw can tell.
- What of a key is the same from draw to draw is in a column; the hash is part of the product
  (`draw_keys`). It is reckoned in Python's integers: numpy takes 10 MB of every worker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mlxd_shared.domain.requests import Sampling

_MASK_64: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def stream_states(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return what `draw_keys` goes on from for each stream's seed and choice, 64 bits each."""
    return tuple(_go_on(_go_on(0, seed & _MASK_64), choice) for seed, choice in pairs)


def draw_keys(
    states: Sequence[int], positions: Sequence[int], purposes: Sequence[int]
) -> list[int]:
    """Return what keys each draw's noise, 64 bits each.

    Start from 0, and for each of seed modulo 2^64, choice, position and purpose, in this order,
    `state = mix64((state ^ word) + gamma)` modulo 2^64, with SplitMix64's gamma and output function
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    places = zip(states, positions, purposes, strict=True)
    return [_go_on(_go_on(state, position), purpose) for state, position, purpose in places]


def words_of(keys: Sequence[int]) -> list[tuple[int, int]]:
    """Return the high and the low 32 bits of each."""
    return [(key >> 32, key & 0xFFFFFFFF) for key in keys]


def _go_on(state: int, word: int) -> int:
    value = ((state ^ word) + _GAMMA) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Columns:
    """What the rows of one group ask for, whatever they have drawn."""

    options: tuple[Sampling, ...]
    choices: tuple[int, ...]
    states: tuple[int, ...]
    """Of each row's seed and choice."""
    temperatures: mx.array
    """float32 [S, 1]."""
    cuts: mx.array
    """float32 [S, 3]: top-k and top-p, inf where they are off, and min-p."""
    xtc: tuple[tuple[float, float], ...] | None
    """Probability and threshold of each; None where nobody asks for it."""

    @classmethod
    def of(cls, options: tuple[Sampling, ...], choices: tuple[int, ...]) -> Columns:
        """Return the columns of rows with these options, each its choice of its request."""
        cuts = [
            (
                one.top_k if one.top_k > 0 else mx.inf,
                one.top_p if 0.0 < one.top_p < 1.0 else mx.inf,
                one.min_p,
            )
            for one in options
        ]
        xtc = tuple((one.xtc_probability, one.xtc_threshold) for one in options)
        return cls(
            options,
            choices,
            stream_states((one.seed, choice) for one, choice in zip(options, choices, strict=True)),
            mx.array([[one.temperature] for one in options], dtype=mx.float32),
            mx.array(cuts, dtype=mx.float32),
            xtc if any(chance > 0.0 for chance, _ in xtc) else None,
        )

    def is_of(self, options: tuple[Sampling, ...], choices: tuple[int, ...]) -> bool:
        """Tell whether these are the very options that the columns were made of."""
        return choices == self.choices and _are_same(options, self.options)


class KeptColumns:
    """The columns of each group of the rows that drew last. One owner: whoever steps them."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._kept: dict[tuple[str, int], Columns] = {}
        self._options: tuple[Sampling, ...] = ()
        self._paths: Mapping[str, list[int]] = {}

    def paths(
        self, options: tuple[Sampling, ...], find: Callable[[], Mapping[str, list[int]]]
    ) -> Mapping[str, list[int]]:
        """Return which rows take which path: `find` says it where the options are others.

        All draws are over one vocabulary, and all hopeful or none.
        """
        if not _are_same(options, self._options):
            self._options, self._paths = options, find()
        return self._paths

    def of(
        self, path: str, first: int, options: tuple[Sampling, ...], choices: tuple[int, ...]
    ) -> Columns:
        """Return the columns of the group of one path whose first row is `first`."""
        kept = self._kept.get((path, first))
        if kept is None or not kept.is_of(options, choices):
            kept = self._kept[path, first] = Columns.of(options, choices)
        return kept

    def clear(self) -> None:
        """Give up what is kept."""
        self._kept.clear()
        self._options, self._paths = (), {}


def _are_same(options: tuple[Sampling, ...], others: tuple[Sampling, ...]) -> bool:
    """Tell whether these are the very same options, object by object."""
    return len(options) == len(others) and all(map(operator.is_, options, others))
