"""The plain step: one pass for all rows, whose tokens are read before the next one is prepared.

Invariants:
- No step is under way between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxd_worker.cache.changes import wait_for_all
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.stepping.base import Carried, Run, runs_of
from mlxd_worker.engine.stepping.forward import decode, make_ready
from mlxd_worker.models.base import Passes


class Plain:
    """Steps all rows by one token. One owner: the engine thread."""

    joins = False
    carries = False
    guesses = False
    ahead = False

    def __init__(self, model: Passes, caches: RowCaches) -> None:
        """Step the rows of `caches`."""
        self._model = model
        self._caches = caches

    def step(
        self, rows: Sequence[Row], *, ahead: bool = False, carried: Sequence[Carried] = ()
    ) -> list[Run]:
        """Evaluate each row's next token; none of the next step."""
        assert not carried, "this step takes no prompt along"
        del ahead
        rows = make_ready(self._caches, rows)
        return runs_of(rows, decode(self._model, self._caches, rows))

    def rest(self) -> None:
        """Wait for the copies of rows that have left, where these may be under way."""
        if self._caches.in_place:
            wait_for_all()

    def drop(self) -> None:
        """Do nothing: nothing is under way."""
