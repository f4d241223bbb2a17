"""The joined step: a pass that takes prompts' tokens along reads the weights once for both.

Invariants:
- A step that takes nothing along is another stepper's, the whole of it.
- Nothing is under way when prompts go along: the loop takes up what is ahead before it reads any.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.stepping.base import Carried, Run, Stepper, runs_of
from mlxd_worker.engine.stepping.forward import batch_of, draw_after, make_ready, next_tokens
from mlxd_worker.models.base import JoiningPasses


class Joined:
    """Steps rows and prompts in one pass, rows alone by `apart`. One owner: the engine thread."""

    joins = True
    carries = False

    def __init__(self, model: JoiningPasses, caches: RowCaches, apart: Stepper) -> None:
        """Step the rows of `caches`, as does `apart`."""
        self._model = model
        self._caches = caches
        self._apart = apart

    @property
    def guesses(self) -> bool:
        """As `apart`."""
        return self._apart.guesses

    @property
    def ahead(self) -> bool:
        """As `apart`: a joined step is none."""
        return self._apart.ahead

    def step(
        self, rows: Sequence[Row], *, ahead: bool = False, carried: Sequence[Carried] = ()
    ) -> list[Run]:
        """Evaluate each row's next token, and what is carried in the same pass."""
        if not carried:
            return self._apart.step(rows, ahead=ahead)
        assert not self._apart.ahead, "a pass that takes a prompt along is never ahead"
        rows = make_ready(self._caches, rows)
        along = [(one.row, one.evaluated) for one in carried]
        batches = [batch_of([chunk]) for chunk in along]
        hidden, *beside = self._model.forward_joined([next_tokens(rows), *batches], self._caches)
        last = [rest[-1:] for rest, one in zip(beside, carried, strict=True) if one.draws]
        hidden = mx.concatenate([hidden, *last], axis=0) if last else hidden
        drawing = [*rows, *(one.row for one in carried if one.draws)]
        drawn = draw_after(self._model, self._caches, drawing, hidden)
        for row in rows:
            row.offset += 1
        for row, tokens in along:
            row.offset += len(tokens)
        return runs_of(drawing, drawn)

    def rest(self) -> None:
        """As `apart`."""
        self._apart.rest()

    def drop(self) -> None:
        """As `apart`."""
        self._apart.drop()
