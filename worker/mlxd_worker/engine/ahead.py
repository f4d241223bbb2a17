"""One decode step ahead: the next one is ready before the last one's tokens are known.

Invariants:
- Where a step writes the caches in place (`CompiledModel.in_place`) the next one is dispatched at
  once. Elsewhere a step that is dispatched while another is under way copies all keys and values
  (decision 0019): on a CPU the next one is only made up meanwhile, as a graph, and dispatched as
  soon as the last one's tokens are read; they are told while it runs (decision 0041). Nowhere does
  it hold more bytes than the tokens under way.
- A row is never ahead of anything that the host must decide first: a constraint, penalties,
  log-probabilities, guesses, a second look at a nucleus, a move of its class. A row that draws its
  last token is left out of the next step. Whoever changes the caches' arrays otherwise calls `rest`
  first: what is under way refers to them.
- What a row has written ahead lies beyond its offset until it is taken up, so a row that ends
  meanwhile leaves no trace of it.
- The device is asked in the order in which its results are needed; nothing is asked twice.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.compiled import CompiledModel
from mlxd_worker.engine.drawing import Drawn
from mlxd_worker.engine.forward import Carried, decode
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampler import needs_second_look, sample
from mlxd_worker.models.base import Batch, Model


class Lead(enum.Enum):
    """How far a step may be ahead of the tokens before it."""

    NONE = enum.auto()
    MADE_UP = enum.auto()
    """Its graph is there; it is dispatched when they are known."""
    DISPATCHED = enum.auto()


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that is ahead, and what it draws for each row."""

    tokens: mx.array
    """int32 [N], not read yet."""
    index_of: dict[RowId, int]
    offsets: dict[RowId, int]
    """Of each row before the step."""


class Decoder:
    """Decodes a token of each row, a step ahead where that may be. One owner: the engine thread."""

    def __init__(self, model: Model, caches: RowCaches, *, lead: Lead | None = None) -> None:
        """Decode the rows of `caches`.

        lead: how far steps may be ahead; None where model and caches are to say it.
        """
        self._model = model
        self._caches = caches
        self._lead = _lead(model, caches) if lead is None else lead
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
        following = self._following(rows, tokens) if ahead else None
        if self._lead is Lead.DISPATCHED:
            self._dispatch(following)
        told = [Drawn(token_id) for token_id in _ints(tokens)]
        if self._lead is Lead.MADE_UP:
            self._dispatch(following)
        return told

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
        if ahead and all(it.token_id >= 0 for it in told):
            tokens = mx.array([it.token_id for it in told], dtype=mx.int32)
            self._dispatch(self._following(rows, tokens))
        return told

    def _taken_up(self, row: Row) -> None:
        self._caches.contents.appending(row.id, row.offset, row.offset + 1)
        row.offset += 1

    def _following(self, rows: Sequence[Row], tokens: mx.array) -> _UnderWay | None:
        """Make up the step after the one that draws `tokens`, for the rows that go on after it."""
        places = [index for index, row in enumerate(rows) if row.left > 1]
        going = [rows[index] for index in places]
        if not going or not self._may(going):
            return None
        if len(going) < len(rows):
            tokens = tokens[mx.array(places, dtype=mx.int32)]
        offsets = {row.id: row.offset for row in going}
        batch = Batch.decode(tokens, list(offsets.values()), list(offsets))
        logits = self._model.logits(self._model.forward(batch, self._caches))
        drawn = sample(logits, [row.draw_after() for row in going], hopeful=False)
        for row in going:
            # It stands there once the step is taken up.
            self._caches.contents.cut_back(row.id, row.offset)
        return _UnderWay(drawn, {row.id: index for index, row in enumerate(going)}, offsets)

    def _may(self, rows: Sequence[Row]) -> bool:
        """Tell whether all rows can go on before their tokens are known; they stand after these."""
        table = self._caches.table
        if self._lead is Lead.NONE or table.moving:
            return False
        if self._lead is Lead.MADE_UP and any(
            needs_second_look(row.request.sampling, self._model.vocab_size) for row in rows
        ):
            return False
        return all(row.foreseeable and row.offset < table.capacity(row.id) for row in rows)

    def _dispatch(self, step: _UnderWay | None) -> None:
        if step is not None:
            mx.async_eval(step.tokens, self._caches.state())  # type: ignore[no-untyped-call]
        self._under_way = step


def _lead(model: Model, caches: RowCaches) -> Lead:
    if isinstance(model, CompiledModel):
        return Lead.DISPATCHED if model.in_place else Lead.NONE
    standard = all(isinstance(layer, KVCache) for layer in caches.layers)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return Lead.MADE_UP if on_cpu and standard and model.stays_lazy else Lead.NONE


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
