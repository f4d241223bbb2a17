"""Work in pieces with pauses between them, so that it takes a part of a processor and not all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SPARE: Final = 4
"""A pause is as many times as long as the piece of work before it: a fifth of a processor is taken.
Beside rows a block of 8 MiB comes every sixteen steps, and is written in one to two of them."""

PAUSE_S_MAX: Final = 0.1
"""A disk that is slow takes no processor meanwhile."""


class Pauses:
    """Pauses in one thread's work. Called between pieces."""

    def __init__(self, *, clock: Callable[[], float], rest: Callable[[float], None]) -> None:
        """Begin to work. rest: waits for so many seconds, or less where there is a hurry."""
        self._clock = clock
        self._rest = rest
        self._began_s = clock()
        self.rested_s = 0.0
        """Of the time since, what were pauses."""

    def __call__(self) -> None:
        """Pause, by how long the last piece took."""
        ended_s = self._clock()
        self._rest(min(SPARE * (ended_s - self._began_s), PAUSE_S_MAX))
        self._began_s = self._clock()
        self.rested_s += self._began_s - ended_s
