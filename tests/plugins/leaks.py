"""A test that asks for `watched` fails where it leaves a snapshot open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import pytest


class Counting(Protocol):
    """Whatever knows how many of its snapshots have not ended."""

    @property
    def live(self) -> int:
        """How many are open."""
        ...


@contextmanager
def watching() -> Iterator[Callable[[Counting], None]]:
    """Yield a function that has an owner of snapshots looked at when the block has ended."""
    owners: list[Counting] = []
    yield owners.append
    left = [owner.live for owner in owners]
    assert not any(left), f"snapshots left open, by owner: {left}"


@pytest.fixture
def watched() -> Iterator[Callable[[Counting], None]]:
    """Give a function that has an owner of snapshots looked at when the test is over."""
    with watching() as watch:
        yield watch
