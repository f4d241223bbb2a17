"""Blocks cut from snapshots, and snapshots put together from blocks; bytes on one side.

Invariants:
- Arrays stay on the engine thread: what leaves it are bytes, each copied once; before that, on the
  device, what is only a part of an array. What comes back is copied into arrays of their own.
- Bits are copied, never converted.
- Only snapshots that own their arrays are cut: what is lazy stands in a running row's arenas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, count, takewhile
from typing import Final

import mlx.core as mx

from mlxd_shared.blocks.block_file import Block, Tensor
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.disk.shapes import WORDS, BlockShapes, name_of
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.kept.stacks import POSITION_AXIS, LayerState, clip

LayerOfKind = tuple[Kind, int]
"""A layer, by its number among those of its kind."""

_DTYPES: Final = {word: dtype for dtype, word in WORDS.items()}


def cut(parts: Sequence[Snapshot], start: int, stop: int) -> tuple[LayerState, ...] | None:
    """Return positions [start, stop) of all layers of a sliceable kind, lazy.

    `parts` are in order. None where they do not have all of it, or one is lazy.
    """
    within = [part for part in parts if part.start < stop and part.stop > start]
    if not within or any(part.lazy for part in within):
        return None
    reach = start
    for part in within:
        if part.start > reach:
            return None
        reach = part.stop
    if reach < stop:
        return None
    pieces = [
        [
            clip(state, max(start - part.start, 0), min(stop, part.stop) - part.start)
            for state in part.layers
        ]
        for part in within
    ]
    return tuple(_join(list(of_layer)) for of_layer in zip(*pieces, strict=True))


def tensors_of(
    states: Mapping[Kind, Sequence[LayerState]], *, done: int = 0, nbytes_max: int | None = None
) -> tuple[Tensor, ...]:
    """Return the bytes of all layers' arrays, copied; by kind and layer as in a block.

    done: how many of them are left out, because they were returned before. nbytes_max: how many
    bytes are copied at most, or one array; None: all.
    """
    named = [
        (name_of(kind, index, number), array)
        for kind, layers in states.items()
        for index, state in enumerate(layers)
        for number, array in enumerate(state)
    ][done:]
    if nbytes_max is not None:
        ends = accumulate(array.nbytes for _, array in named)
        named = named[: max(sum(end <= nbytes_max for end in ends), 1)]
    flat = [mx.contiguous(array).view(mx.uint8) for _, array in named]
    mx.eval(flat)
    return tuple(
        Tensor(name, WORDS[array.dtype], tuple(array.shape), bytes_of(content))
        for (name, array), content in zip(named, flat, strict=True)
    )


def count_arrays(states: Mapping[Kind, Sequence[LayerState]]) -> int:
    """Return how many tensors `tensors_of` makes of them in all."""
    return sum(len(state) for layers in states.values() for state in layers)


def bytes_of(array: mx.array) -> bytes:
    """Return the bytes of an array that has been evaluated, row by row, copied."""
    return bytes(memoryview(array))  # type: ignore[arg-type]  # its stubs know no buffers


def split_by_layer(block: Block, shapes: BlockShapes) -> dict[LayerOfKind, tuple[Tensor, ...]]:
    """Return a block's tensors by layer, in their order; it is one that `shapes` have checked."""
    named = {tensor.name: tensor for tensor in block.tensors}
    layers: dict[LayerOfKind, tuple[Tensor, ...]] = {}
    for kind in shapes.kinds(block.part):
        for index in range(shapes.count(kind)):
            names = (name_of(kind, index, number) for number in count())
            own = takewhile(named.__contains__, names)
            layers[kind, index] = tuple(named[name] for name in own)
    return layers


def state_of(tensors: Iterable[Tensor]) -> LayerState:
    """Return one layer's arrays of a block, as memory of their own."""
    state = []
    for tensor in tensors:
        flat = mx.array(memoryview(tensor.content))  # type: ignore[arg-type]  # as above
        state.append(flat.view(_DTYPES[tensor.dtype]).reshape(tensor.shape))
    return tuple(state)


def states_of(block: Block, shapes: BlockShapes) -> dict[Kind, tuple[LayerState, ...]]:
    """Return a block's arrays by kind and layer: evaluated, and memory of their own.

    The block is one that `shapes` have checked.
    """
    states: dict[Kind, tuple[LayerState, ...]] = dict.fromkeys(shapes.kinds(block.part), ())
    for (kind, _), tensors in split_by_layer(block, shapes).items():
        states[kind] += (state_of(tensors),)
    mx.eval(list(states.values()))
    return states


def _join(pieces: list[LayerState]) -> LayerState:
    """Return one layer's pieces as one, lazy; a single one may be a view."""
    if len(pieces) == 1:
        return pieces[0]
    return tuple(
        mx.concatenate(list(arrays), axis=POSITION_AXIS) for arrays in zip(*pieces, strict=True)
    )
