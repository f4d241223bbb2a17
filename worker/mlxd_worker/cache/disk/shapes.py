"""What a model's blocks look like: names, shapes and types of their tensors, and their form.

Invariants:
- A block of a model has exactly these tensors, layer by layer of each kind. One that has others is
  refused before an array is made of it, whatever its checksum says.
- Everything follows from what layers say of themselves (`LayerCache.shapes`), so a kind of layer
  says in one place what is kept of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import mlx.core as mx

from mlxd_shared.blocks.block_file import Block, BlockRefused, Fault, Part
from mlxd_worker.cache.base import ArrayShape, Kind, LayerCache

WORDS: Final[Mapping[mx.Dtype, str]] = {
    mx.uint8: "U8", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.float32: "F32", mx.uint32: "U32", mx.int32: "I32",
}  # fmt: skip
"""What safetensors calls the types that layers keep."""

LENGTH_FOR_NAMES = 1 << 24
"""A length at which every window has wrapped."""

Layers = Mapping[Kind, Sequence[LayerCache]]


def describe_layers(layers: Sequence[LayerCache | None]) -> tuple[str, ...]:
    """Return what each layer keeps of a long row; an empty text for one that keeps nothing."""
    return tuple("" if layer is None else _describe(layer) for layer in layers)


def name_of(kind: Kind, layer: int, part: int) -> str:
    """Return what a block calls an array: `layer` counts those of its kind."""
    return f"{kind}.{layer}.{part}"


class BlockShapes:
    """The tensors of a model's blocks."""

    def __init__(self, layers: Layers, *, block_tokens: int) -> None:
        """Describe blocks of so many tokens of a model with these layers."""
        self.block_tokens = block_tokens
        self._layers = {
            Part.ENTRIES: {kind: tuple(same) for kind, same in layers.items() if kind.sliceable},
            Part.STATE: {kind: tuple(same) for kind, same in layers.items() if not kind.sliceable},
        }
        self._nbytes: dict[tuple[Part, int], int] = {}
        """What was asked for; depths are at most as many as a context has blocks."""

    def kinds(self, part: Part) -> tuple[Kind, ...]:
        """Return the kinds of layers of which a part holds something; none: it has no files."""
        return tuple(self._layers[part])

    def count(self, kind: Kind) -> int:
        """Return how many layers are of a kind."""
        part = Part.ENTRIES if kind.sliceable else Part.STATE
        return len(self._layers[part][kind])

    def of(self, part: Part, depth: int) -> dict[str, ArrayShape]:
        """Return the tensors of one part of the block that has `depth` before it, by name."""
        start = depth * self.block_tokens
        return {
            name_of(kind, index, number): shape
            for kind, layers in self._layers[part].items()
            for index, layer in enumerate(layers)
            for number, shape in enumerate(layer.shapes(start, start + self.block_tokens))
        }

    def nbytes(self, part: Part, depth: int) -> int:
        """Return the bytes of a part's tensors."""
        known = self._nbytes.get((part, depth))
        if known is None:
            shapes = self.of(part, depth).values()
            known = sum(math.prod(shape.shape) * shape.dtype.size for shape in shapes)
            self._nbytes[part, depth] = known
        return known

    @property
    def nbytes_max(self) -> int:
        """The most bytes that the tensors of one part can have."""
        deep = LENGTH_FOR_NAMES // self.block_tokens
        return max(self.nbytes(part, deep) for part in Part)

    @property
    def block_nbytes(self) -> int:
        """The most bytes that all parts of one block take."""
        deep = LENGTH_FOR_NAMES // self.block_tokens
        return sum(self.nbytes(part, deep) for part in Part)

    def check(self, block: Block) -> None:
        """Do nothing.

        Raises:
            BlockRefused: the block has not the tensors that it should have.
        """
        wanted = {
            name: (WORDS[shape.dtype], shape.shape)
            for name, shape in self.of(block.part, block.depth).items()
        }
        present = {tensor.name: (tensor.dtype, tensor.shape) for tensor in block.tensors}
        if list(present.items()) != list(wanted.items()):
            raise BlockRefused(Fault.FOREIGN, "its tensors are not those of this model")


def _describe(layer: LayerCache) -> str:
    shapes = layer.shapes(0, LENGTH_FOR_NAMES)
    arrays = (f"{WORDS[shape.dtype]}{list(shape.shape)}" for shape in shapes)
    return " ".join((layer.kind.value, *arrays))
