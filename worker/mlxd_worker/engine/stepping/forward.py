"""What a step evaluates: chunks of prompts, or one token of every decoding row.

Invariants:
- A pass over prompts evaluates the caches alone, or where it writes in place its rows, which say
  that it has: no head, no logits.
- A decode step syncs with the host once, for all rows together (`drawing`).
- Nothing of a step outlives it: no array, view or plan is kept.
- A fault in here leaves the caches in an unknown state; the engine's owner ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.axes import turns_of
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampling.drawing import Drawn, draw_all
from mlxd_worker.engine.stepping.spans import lasts_of
from mlxd_worker.models.base import Batch, Inlay, Passes

RowChunk = tuple[Row, Sequence[int]]
"""A row, and its prompt's next tokens."""


def prefill(
    model: Passes,
    caches: RowCaches,
    chunks: Sequence[RowChunk],
    *,
    wait: bool = True,
    inlays: tuple[Inlay, ...] = (),
) -> None:
    """Evaluate rows' next prompt tokens into the caches in one pass, and move their offsets.

    wait: until it is done; else it is only dispatched, for passes that write in place alone.
    Several rows' only where the model and its caches can do that (`reads_together`). inlays: what
    takes the places of tokens, which are counted through all chunks.
    """
    caches.reserve_all({row.id: row.offset + len(tokens) for row, tokens in chunks})
    batch = batch_of(chunks)
    hidden = model.forward(replace(batch, inlays=inlays) if inlays else batch, caches)
    along: list[mx.array] = []
    scored: list[tuple[Row, mx.array]] = []
    first = 0
    for row, tokens in chunks:
        own = hidden if len(chunks) == 1 else hidden[first : first + len(tokens)]
        if row.pool is not None:
            along.append(row.pool.take_states(own))
        if row.scores is not None:
            scored.append((row, own))
        first += len(tokens)
    if model.capabilities.overlaps_steps:
        along.append(hidden)  # what is written in place is there once this is
    if not wait:
        assert not scored, "scores are read at once"
        mx.async_eval(caches.state(), along)  # type: ignore[no-untyped-call]
    else:
        mx.eval(caches.state(), along, [own for _, own in scored])
    for row, own in scored:
        assert row.scores is not None
        row.scores.take_states(own, row.offset, model.logits)
    for row, tokens in chunks:
        row.offset += len(tokens)


def batch_of(chunks: Sequence[RowChunk]) -> Batch:
    """Return the batch of rows' next prompt tokens, without what takes the places of some."""
    if len(chunks) == 1:
        ((row, tokens),) = chunks
        batch = Batch.prefill(tokens, row.offset, row.id)
    else:
        batch = Batch.chunks([(tokens, row.offset, row.id) for row, tokens in chunks])
    shown = [(row.request.images, row.offset, len(tokens)) for row, tokens in chunks]
    turns, lasts = turns_of(shown), lasts_of(shown)
    return replace(batch, turns=turns, lasts=lasts) if lasts or turns is not None else batch


def decode(model: Passes, caches: RowCaches, rows: Sequence[Row]) -> list[Drawn]:
    """Evaluate each row's next token; return what was drawn after them, in the rows' order.

    Each row has reserved the token.
    """
    drawn = draw_after(model, caches, rows, model.forward(next_tokens(rows), caches))
    for row in rows:
        row.offset += 1
    return drawn


def next_tokens(rows: Sequence[Row]) -> Batch:
    """Return the batch of each row's next token."""
    return Batch.decode(
        [row.next_token() for row in rows],
        [row.offset for row in rows],
        [row.id for row in rows],
        shifts=[row.shift for row in rows],
    )


def draw_after(
    model: Passes, caches: RowCaches, rows: Sequence[Row], hidden: mx.array
) -> list[Drawn]:
    """Return what is drawn after each row of `hidden`, all of the step evaluated."""
    return draw_all(
        model.logits(hidden),
        [row.draw() for row in rows],
        [row.request.top_logprobs for row in rows],
        along=caches.state(),
    )


def make_ready(
    caches: RowCaches,
    rows: Sequence[Row],
    *,
    width: int = 1,
    before: Callable[[], None] | None = None,
) -> list[Row]:
    """Reserve `width` more tokens a row; return the rows in the order that costs no gathering.

    before: called before a row moves, and only then.
    """
    caches.reserve_all({row.id: row.offset + width for row in rows}, before=before)
    by_id = {row.id: row for row in rows}
    return [by_id[row_id] for row_id in caches.rows if row_id in by_id]
