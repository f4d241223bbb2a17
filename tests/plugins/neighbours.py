"""Neighbours of every test: arrays that others in its process have left, and that come and go.

What a test says of MLX's bytes must be about its own arrays, so this plugin makes sure that there
are others, in each process that has MLX loaded: some that stay, some that go before the test or
between its fixtures and itself, some that only a reference cycle holds, and some in MLX's pool.
Which, is derived from the test's name and the seed of the order, so a run can be repeated.
"""

from __future__ import annotations

import random
import sys

import pytest

from tests.support.effort import IN_FULL

KEPT_MAX = 6
NBYTES = range(1 << 18, 2 << 20) if IN_FULL else range(1 << 16, 1 << 19)
"""Of each; either way more than what tests that count bytes leave room for."""
MLX = "mlx.core"


class Neighbours:
    """Holds arrays for as long as it likes."""

    def __init__(self, seed: object) -> None:
        self._seed = seed
        self._kept: list[object] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Have neighbours come and go before the test's fixtures are made."""
        self._move(f"{item.nodeid} setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Have them come and go between the fixtures and the test."""
        self._move(f"{item.nodeid} call")

    def _move(self, name: str) -> None:
        if MLX not in sys.modules:
            return
        rng = random.Random(f"{self._seed} {name}")
        if self._kept and (len(self._kept) == KEPT_MAX or rng.random() < 0.5):
            self._kept.pop(rng.randrange(len(self._kept)))
        self._kept.append(_array(rng))
        _array(rng)  # goes into MLX's pool
        cycle: list[object] = [_array(rng)]
        cycle.append(cycle)


def _array(rng: random.Random) -> object:
    import mlx.core as mx  # noqa: PLC0415 - only where the tests have loaded it

    array = mx.zeros((rng.choice(NBYTES),), dtype=mx.uint8)
    mx.eval(array)
    return array


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have neighbours in every run, and others with another seed."""
    seed = config.getoption("randomly_seed", 0)  # drawn when pytest-randomly was configured
    config.pluginmanager.register(Neighbours(seed), "neighbours")
