"""What a step evaluates: one prompt chunk of one row, one token of every decoding row, or both.

Invariants:
- A prefill chunk evaluates the caches alone: no head, no logits.
- A decode step syncs with the host once, for all rows together (`drawing`).
- Nothing of a step outlives it: no array, view or plan is kept.
- A fault in here leaves the caches in an unknown state; the engine's owner ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.cache.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.drawing import Drawn, draw_all
from mlxd_worker.engine.row import Row
from mlxd_worker.models.base import Batch, Model


@dataclass(frozen=True, slots=True)
class Carried:
    """A prompt's next tokens, which a decode step's pass takes along; the row has reserved them."""

    row: Row
    tokens: tuple[int, ...]
    """Without the prompt's last one."""

    @property
    def draws(self) -> bool:
        """Whether the prompt ends with these: then its first token is drawn in the same pass."""
        return len(self.tokens) == self.row.prefill_left


def joins_passes(model: Model, caches: RowCaches) -> bool:
    """Tell whether a decode step's pass can take a prompt's tokens along, and gains by that.

    On a CPU, where its products read the weights once for all. Elsewhere shapes must be few.
    """
    standard = all(isinstance(layer, KVCache) for layer in caches.layers)
    return model.joins_passes and standard and not caches.bounded_shapes


def prefill(model: Model, caches: RowCaches, row: Row, tokens: Sequence[int]) -> None:
    """Evaluate the row's next prompt tokens into the caches, and move its offset."""
    caches.reserve(row.id, tokens=row.offset + len(tokens))
    hidden = model.forward(Batch.prefill(tokens, row.offset, row.id), caches)
    along = [] if row.pool is None else [row.pool.taken(hidden)]
    mx.eval(caches.state(), along)
    row.offset += len(tokens)


def decode(
    model: Model, caches: RowCaches, rows: Sequence[Row], carried: Sequence[Carried] = ()
) -> list[Drawn]:
    """Evaluate each row's next token; return what was drawn after them, in the rows' order.

    Each row has reserved the token. carried: what the same pass evaluates beside them; the rows of
    these that draw come last.
    """
    if carried:
        return _decode_joined(model, caches, rows, carried)
    batch = _next_tokens(rows)
    drawn = _drawn(model, caches, rows, model.forward(batch, caches))
    for row in rows:
        row.offset += 1
    return drawn


def _decode_joined(
    model: Model, caches: RowCaches, rows: Sequence[Row], carried: Sequence[Carried]
) -> list[Drawn]:
    along = [(it.row, (*it.tokens, *((it.row.next_token(),) * it.draws))) for it in carried]
    drawing = [it.row for it in carried if it.draws]
    batches = [Batch.prefill(tokens, row.offset, row.id) for row, tokens in along]
    hidden, *beside = model.forward_joined([_next_tokens(rows), *batches], caches)
    last = [rest[-1:] for rest, it in zip(beside, carried, strict=True) if it.draws]
    hidden = mx.concatenate([hidden, *last], axis=0) if last else hidden
    drawn = _drawn(model, caches, [*rows, *drawing], hidden)
    for row in rows:
        row.offset += 1
    for row, tokens in along:
        row.offset += len(tokens)
    return drawn


def _next_tokens(rows: Sequence[Row]) -> Batch:
    return Batch.decode(
        [row.next_token() for row in rows],
        [row.offset for row in rows],
        [row.id for row in rows],
    )


def _drawn(model: Model, caches: RowCaches, rows: Sequence[Row], hidden: mx.array) -> list[Drawn]:
    """Return what is drawn after each row of `hidden`, all of the step evaluated."""
    return draw_all(
        model.logits(hidden),
        [row.draw() for row in rows],
        [row.request.top_logprobs for row in rows],
        along=caches.state(),
    )


def made_ready(caches: RowCaches, rows: Sequence[Row], *, width: int = 1) -> list[Row]:
    """Reserve `width` more tokens a row; return the rows in the order that costs no gathering."""
    caches.reserve_all({row.id: row.offset + width for row in rows})
    by_id = {row.id: row for row in rows}
    return [by_id[row_id] for row_id in caches.rows if row_id in by_id]
