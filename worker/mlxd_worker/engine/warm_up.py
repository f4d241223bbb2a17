"""Run what MLX keys by shape once before READY, so that no request pays for the first of its kind.

Invariants:
- Everything goes through the model and the row caches as in a request, and leaves no row behind.
- One arena at a time has rows; with those that are kept it is within what the fit has reserved.
- On a CPU nothing is keyed by shape, and there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxd_models.sizes.arena_sizes import capacity_classes, slot_sizes
from mlxd_shared import config
from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.layers.attention import (
    CAUSAL_WARMED,
    CAUSAL_WIDTHS,
    CHUNK_WIDTHS,
    causal_width,
)
from mlxd_worker.cache.layers.shapes import WIDE_WIDTH, AttentionShape
from mlxd_worker.cache.layers.tokens import TOKEN_SIZES, is_read_in_place
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.chunking import Chunking, reads_together
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Batch, Passes

_ROW, _OTHER, _BETWEEN = RowId(-1), RowId(-2), RowId(-3)
"""No stream's rows."""
_CHUNKS = (2, 3)
"""Tokens of two rows that are read together."""


def warm_shapes(model: Passes, caches: RowCaches, *, compiled: CompiledModel | None = None) -> int:
    """Run each of the caches' shapes once; return how many there were. No row may be there.

    Engine thread; seconds on a GPU that has to build its kernels. compiled: the same model, where
    its steps are compiled: then a lone row is run both as such and like one of several.
    """
    if not caches.bounded_shapes:
        return 0
    if caches.in_place and compiled is not None:
        return _warm_tokens(model, compiled, caches)
    model = model if compiled is None else compiled
    guesses = Kind.RECURRENT not in caches.contents.layers
    shapes = [shape for shape in caches.shapes() if guesses or shape.width != WIDE_WIDTH]
    for shape in shapes:
        caches.rehearse(_ROW, capacity=shape.capacity, slots=shape.slots)
        if shape.width == WIDE_WIDTH:
            _run_wide(model, caches, shape)
        else:
            _run(model, caches, shape, offset=0)
            if compiled is not None and shape.width == 1 and shape.slots > 1:
                # The row's second token, as a step of several rows would run it.
                batch = Batch.prefill([0], 1, _ROW)
                hidden = compiled.forward(batch, caches, lone_row=False)
                mx.eval(compiled.logits(hidden), caches.state())
        caches.leave(_ROW, sound=False)
    _warm_wrapped(model, caches, [shape.width for shape in shapes if shape.width > WIDE_WIDTH])
    if reads_together(model.capabilities, caches):
        _warm_company(model, caches)
    return len(shapes)


def _warm_tokens(model: Passes, compiled: CompiledModel, caches: RowCaches) -> int:
    """Run each number of tokens that a pass in place may have, and the chunks of longer prompts.

    One row stands for all: the rest of a pass is filled with copies of its token.
    """
    table = caches.table
    caches.rehearse(_ROW, capacity=table.classes[-1], slots=table.rows_max)
    able = compiled.capabilities
    in_place = able.prompts_in_place if reads_together(able, caches) else 0
    most = min(in_place, config.PREFILL_PASS_TOKENS)
    prompts = [size for size in TOKEN_SIZES if size <= most]
    offset = 0
    for tokens, sizes in ((1, slot_sizes(table.rows_max)), (2, prompts)):
        for size in sizes:
            if offset + tokens > table.context_max:
                break
            batch = Batch.prefill([0] * tokens, offset, _ROW)
            hidden = compiled.forward(batch, caches, least=size)
            if tokens == 1:  # so many rows draw in such a step: a head's kernel may be theirs alone
                hidden = mx.repeat(hidden, size, axis=0)
            mx.eval(compiled.logits(hidden), caches.state())
            offset += tokens
    chunks = chunks_to_warm(
        capacity_classes(table.context_max, table.rows_max),
        table.context_max,
        in_place=in_place,
        causal=Chunking.of(able, caches).copies,
    )
    for begin, width in chunks:
        caches.leave(_ROW, sound=False)
        caches.rehearse(_ROW, capacity=table.classes[-1], slots=table.rows_max)
        caches.contents.appending(_ROW, 0, begin)
        hidden = model.forward(Batch.prefill([0] * width, begin, _ROW), caches)
        mx.eval(hidden, caches.state())
    caches.leave(_ROW, sound=False)
    return len(chunks) + len(prompts) + len(slot_sizes(table.rows_max))


def chunks_to_warm(
    spans: Sequence[int], context_max: int, *, in_place: int, causal: bool
) -> list[tuple[int, int]]:
    """Return where the chunks of long prompts begin that are run, and how wide they are. Pure.

    in_place: up to how many tokens are read over tokens, which has been run. causal: whether those
    at multiples of their width are attended without a mask (`causal_width`): each as wide as that,
    and padded, up to `CAUSAL_WARMED` positions; what lies beyond takes a tenth of a second when it
    is first met.
    """

    def by_products(begin: int, width: int) -> bool:
        return begin >= 0 and not is_read_in_place([begin + width], [width], most=in_place)

    chunks = []
    for end in [min(span, context_max) for span in spans]:
        # One off a multiple, so that a mask is what is run.
        ends = [(end - width - (causal and end > width), width) for width in CHUNK_WIDTHS]
        # Where those are read in place, a longer one may still meet the same shape.
        chunks += ends if by_products(*ends[-1]) else [*ends, (1, end - 1)]
    if causal:
        # A row's place may be longer than its context: padding reaches beyond that.
        longest = min(spans[-1], CAUSAL_WARMED)
        chunks += [
            (begin, count)
            for width in CAUSAL_WIDTHS
            for begin in range(0, longest, width)
            for count in (min(width, context_max - begin), width - 1)
            if causal_width(begin, count, longest) == width and begin + count <= context_max
        ]
    return [chunk for chunk in chunks if by_products(*chunk)]


def _warm_company(model: Passes, caches: RowCaches) -> None:
    """Run passes over two rows' chunks: neighbours, and where there is room others.

    They have no shapes of their own, but operations whose kernels are built at their first use.
    """
    tokens = _CHUNKS[-1]
    room = min(caches.table.rows_max, len((_ROW, _BETWEEN, _OTHER)))
    if room < len(_CHUNKS) or caches.table.context_max < tokens:
        return
    for rows in ((_ROW, _OTHER), (_ROW, _BETWEEN, _OTHER))[: room - 1]:
        for row in rows:
            joined = caches.join(row, tokens=tokens, coming=len(rows))
            assert joined, "nobody else is there"
        chunks = zip((_ROW, _OTHER), _CHUNKS, strict=True)
        batch = Batch.chunks([([0] * count, 0, row) for row, count in chunks])
        mx.eval(model.forward(batch, caches), caches.state())
        for row in rows:
            caches.leave(row, sound=False)


def _warm_wrapped(model: Passes, caches: RowCaches, widths: list[int]) -> None:
    """Run the chunks' shapes of sliding windows that have gone around: those of a row beyond."""
    windows = [
        layer for layer in caches.layers if layer is not None and layer.kind is Kind.ROTATING
    ]
    if not windows:
        return
    capacity, widest = caches.table.classes[-1], max(widths)
    caches.rehearse(_ROW, capacity=capacity, slots=1)
    offset, wide = 0, AttentionShape(capacity, 1, widest)
    longest = caches.table.context_max
    while offset < longest and any(layer.rewinds(offset, 0) for layer in windows):
        offset = _run(model, caches, wide, offset=offset)
    for width in sorted(set(widths)):
        offset = _run(model, caches, AttentionShape(capacity, 1, width), offset=offset)
    caches.leave(_ROW, sound=False)


def _run_wide(model: Passes, caches: RowCaches, shape: AttentionShape) -> None:
    """Run a step in which rows guess: of two, since a single row's is that of a chunk."""
    joined = caches.join(_OTHER, tokens=min(shape.capacity, caches.table.context_max))
    assert joined, "such a shape has a second slot"
    batch = Batch(
        tokens=mx.zeros((2, shape.width), dtype=mx.int32),
        offsets=mx.zeros(2, dtype=mx.int32),
        lengths=(shape.width,) * 2,
        rows=(_ROW, _OTHER),
    )
    mx.eval(model.logits(model.forward(batch, caches)), caches.state())
    caches.leave(_OTHER, sound=False)


def _run(model: Passes, caches: RowCaches, shape: AttentionShape, *, offset: int) -> int:
    """Run one pass of a shape, as wide as the row's capacity allows; return the row's offset."""
    tokens = min(shape.width, shape.capacity - offset, caches.table.context_max - offset)
    if tokens <= 0:
        return offset
    hidden = model.forward(Batch.prefill([0] * tokens, offset, _ROW), caches)
    if shape.width == 1:
        mx.eval(model.logits(hidden))
    mx.eval(caches.state())
    return offset + tokens
