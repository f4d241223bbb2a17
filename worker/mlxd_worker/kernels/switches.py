"""Which fast paths this process takes: all of them, but for those that were switched off.

Invariants:
- A worker sets them once, before it loads a model; the proof of the engine alone sets them again,
  around what it compares.
- Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mlxd_shared.domain.fast_paths import FastPath


class Switches:
    """The paths that are off. Set on one thread, and read on any."""

    def __init__(self) -> None:
        self._off: frozenset[FastPath] = frozenset()
        self._followers: list[Callable[[], None]] = []

    def is_on(self, path: FastPath) -> bool:
        """Return whether a path may be taken."""
        return path not in self._off

    def turn_off(self, paths: Iterable[FastPath]) -> None:
        """Have these off from now on, besides those that are."""
        self._set(self._off | frozenset(paths))

    @contextmanager
    def without(self, *paths: FastPath) -> Iterator[None]:
        """Have these off while the body runs; models that are used in it are built in it."""
        before = self._off
        self.turn_off(paths)
        try:
            yield
        finally:
            self._set(before)

    def follow(self, follower: Callable[[], None]) -> None:
        """Call `follower` now and after every change: for a path that is not taken in Python."""
        self._followers.append(follower)
        follower()

    def _set(self, off: frozenset[FastPath]) -> None:
        self._off = off
        for follower in self._followers:
            follower()


SWITCHES = Switches()
"""This process's."""
