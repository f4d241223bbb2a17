"""What a step evaluates: one prompt chunk of one row, or one token of every decoding row.

Invariants:
- A prefill chunk evaluates the caches alone: no head, no logits.
- A decode step syncs with the host once, for the drawn ids of all rows together.
- Nothing of a step outlives it: no array, view or plan is kept.
- A fault in here leaves the caches in an unknown state; the engine's owner ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampler import Draw, sample
from mlxd_worker.models.base import Batch, Model


def prefill(model: Model, caches: RowCaches, row: Row, tokens: Sequence[int]) -> None:
    """Evaluate the row's next prompt tokens into the caches, and move its offset."""
    caches.reserve(row.id, tokens=row.offset + len(tokens))
    model.forward(Batch.prefill(tokens, row.offset, row.id), caches)
    mx.eval(caches.state())
    row.offset += len(tokens)


def decode(model: Model, caches: RowCaches, rows: Sequence[Row]) -> list[int]:
    """Evaluate each row's next token; return the ids drawn after them, in the rows' order.

    Each row has reserved the token. One whose logits are not usable gets `sampler.TOKEN_INVALID`.
    """
    batch = Batch.decode(
        [row.next_token() for row in rows],
        [row.offset for row in rows],
        [row.id for row in rows],
    )
    hidden = model.forward(batch, caches)
    draws = [
        Draw(row.request.sampling, position=row.generated, recent=row.recent.counts) for row in rows
    ]
    drawn = sample(model.logits(hidden), draws)
    del hidden
    mx.eval(drawn, caches.state())
    for row in rows:
        row.offset += 1
    return cast("list[int]", drawn.tolist())


def made_ready(caches: RowCaches, rows: Sequence[Row]) -> list[Row]:
    """Reserve one more token for each row; return them in the order that costs no gathering."""
    caches.reserve_all({row.id: row.offset + 1 for row in rows})
    by_id = {row.id: row for row in rows}
    return [by_id[row_id] for row_id in caches.rows if row_id in by_id]
