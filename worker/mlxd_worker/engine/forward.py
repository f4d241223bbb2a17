"""What a step evaluates: one prompt chunk of one row, or one token of every decoding row.

Invariants:
- A prefill chunk evaluates the caches alone: no head, no logits.
- A decode step syncs with the host once, for all rows together (`drawing`).
- Nothing of a step outlives it: no array, view or plan is kept.
- A fault in here leaves the caches in an unknown state; the engine's owner ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.drawing import Drawn, draw_all
from mlxd_worker.engine.row import Row
from mlxd_worker.models.base import Batch, Model


def prefill(model: Model, caches: RowCaches, row: Row, tokens: Sequence[int]) -> None:
    """Evaluate the row's next prompt tokens into the caches, and move its offset."""
    caches.reserve(row.id, tokens=row.offset + len(tokens))
    model.forward(Batch.prefill(tokens, row.offset, row.id), caches)
    mx.eval(caches.state())
    row.offset += len(tokens)


def decode(model: Model, caches: RowCaches, rows: Sequence[Row]) -> list[Drawn]:
    """Evaluate each row's next token; return what was drawn after them, in the rows' order.

    Each row has reserved the token.
    """
    batch = Batch.decode(
        [row.next_token() for row in rows],
        [row.offset for row in rows],
        [row.id for row in rows],
    )
    logits = model.logits(model.forward(batch, caches))
    drawn = draw_all(
        logits,
        [row.draw() for row in rows],
        [row.request.top_logprobs for row in rows],
        along=caches.state(),
    )
    for row in rows:
        row.offset += 1
    return drawn


def made_ready(caches: RowCaches, rows: Sequence[Row], *, width: int = 1) -> list[Row]:
    """Reserve `width` more tokens a row; return the rows in the order that costs no gathering."""
    caches.reserve_all({row.id: row.offset + width for row in rows})
    by_id = {row.id: row for row in rows}
    return [by_id[row_id] for row_id in caches.rows if row_id in by_id]
