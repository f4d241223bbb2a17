"""One decode step ahead: the next one is dispatched before the last one's tokens are read.

Invariants:
- Only where a step writes the caches in place (`CompiledModel.in_place`): anywhere else a step that
  is dispatched while another is under way copies all keys and values (decision 0019). So it holds
  no bytes but the tokens under way.
- A row is never ahead of anything that the host must decide first: a constraint, penalties,
  log-probabilities, guesses, its last token, a move of its class. Whoever changes the caches'
  arrays otherwise calls `rest` first: what is under way refers to them.
- What a row has written ahead lies beyond its offset until it is taken up, so a row that ends
  meanwhile leaves no trace of it.
- The device is asked in the order in which its results are needed; nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.compiled import CompiledModel
from mlxd_worker.engine.drawing import Drawn
from mlxd_worker.engine.forward import Carried, decode
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampler import Draw, sample
from mlxd_worker.models.base import Batch, Model


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that has been dispatched, and what it draws for each row."""

    tokens: mx.array
    """int32 [N], not read yet."""
    index_of: dict[RowId, int]
    offsets: dict[RowId, int]
    """Of each row before the step."""


class Decoder:
    """Decodes a token of each row, a step ahead where that may be. One owner: the engine thread."""

    def __init__(self, model: Model, caches: RowCaches) -> None:
        """Decode the rows of `caches`."""
        self._model = model
        self._caches = caches
        self._may_run_ahead = isinstance(model, CompiledModel) and model.in_place
        self._under_way: _UnderWay | None = None

    @property
    def ahead(self) -> bool:
        """Whether a step is under way that nobody has taken up."""
        return self._under_way is not None

    def decode(
        self, rows: Sequence[Row], *, ahead: bool, carried: Sequence[Carried] = ()
    ) -> list[Drawn]:
        """Return what is drawn for each row, in the rows' order; they have reserved the token.

        ahead: whether the same rows will decode next, as far as anybody knows. carried: what the
        same pass evaluates beside them; never where steps run ahead.
        """
        if carried:
            assert self._under_way is None, "a pass that takes a prompt along is never ahead"
            return decode(self._model, self._caches, rows, carried)
        step, self._under_way = self._under_way, None
        known = [row for row in rows if step is not None and _matches(step, row)]
        if step is None or len(known) < len(rows):
            return self._decode_some(rows, step, known, ahead=ahead)
        for row in rows:
            self._taken_up(row)
        tokens = _tokens_of(step, rows)
        if ahead and self._may(rows):
            self._dispatch(rows, tokens, [row.draw_after() for row in rows])
        return [Drawn(token_id) for token_id in _ints(tokens)]

    def rest(self) -> None:
        """Wait for what is under way: then nothing but the caches refers to their arrays."""
        if self._under_way is not None:
            mx.eval(self._under_way.tokens, self._caches.state())

    def drop(self) -> None:
        """Forget what is under way: the rows are decoded in another way."""
        self.rest()
        self._under_way = None

    def _decode_some(
        self, rows: Sequence[Row], step: _UnderWay | None, known: Sequence[Row], *, ahead: bool
    ) -> list[Drawn]:
        """Decode the rows that have nothing under way, and take up what the others have."""
        drawn: dict[RowId, Drawn] = {}
        if step is not None and known:
            for row, token_id in zip(known, _ints(_tokens_of(step, known)), strict=True):
                self._taken_up(row)
                drawn[row.id] = Drawn(token_id)
        elif step is not None:
            mx.eval(step.tokens)
        fresh = [row for row in rows if row.id not in drawn]
        given = decode(self._model, self._caches, fresh)
        drawn |= {row.id: it for row, it in zip(fresh, given, strict=True)}
        told = [drawn[row.id] for row in rows]
        if ahead and self._may(rows) and all(it.token_id >= 0 for it in told):
            tokens = mx.array([it.token_id for it in told], dtype=mx.int32)
            self._dispatch(rows, tokens, [row.draw_after() for row in rows])
        return told

    def _taken_up(self, row: Row) -> None:
        self._caches.contents.appending(row.id, row.offset, row.offset + 1)
        row.offset += 1

    def _may(self, rows: Sequence[Row]) -> bool:
        """Tell whether all rows can go on before their tokens are known; they stand after these."""
        table = self._caches.table
        return (
            self._may_run_ahead
            and not table.moving
            and all(row.foreseeable and row.offset < table.capacity(row.id) for row in rows)
        )

    def _dispatch(self, rows: Sequence[Row], tokens: mx.array, draws: Sequence[Draw]) -> None:
        offsets = {row.id: row.offset for row in rows}
        batch = Batch.decode(tokens, list(offsets.values()), list(offsets))
        logits = self._model.logits(self._model.forward(batch, self._caches))
        drawn = sample(logits, draws, hopeful=False)
        mx.async_eval(drawn, self._caches.state())  # type: ignore[no-untyped-call]
        for row in rows:
            # It stands there once the step is taken up.
            self._caches.contents.cut_back(row.id, row.offset)
        index_of = {row.id: index for index, row in enumerate(rows)}
        self._under_way = _UnderWay(drawn, index_of, offsets)


def _matches(step: _UnderWay, row: Row) -> bool:
    return step.offsets.get(row.id) == row.offset


def _tokens_of(step: _UnderWay, rows: Sequence[Row]) -> mx.array:
    """Return what the step draws for these rows, lazy."""
    indices = [step.index_of[row.id] for row in rows]
    if indices == list(range(step.tokens.shape[0])):
        return step.tokens
    return step.tokens[mx.array(indices, dtype=mx.int32)]


def _ints(tokens: mx.array) -> list[int]:
    return cast("list[int]", tokens.tolist())
