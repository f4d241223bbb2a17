"""Weights that are packed while they are loaded: which, and into what. One table. Pure.

Invariants:
- Both who plans a load and who carries it out reckon with these very tables and sums.
- Embeddings, heads, routers, norms and what makes keys and values of latents are kept as numbers:
  they are small, or an error in them is seen in every token. What is stored packed stays so.
- Numbers are what a checkpoint stores as floats of 8 bits or more, not yet packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mlxd_shared.domain.requests import Weights


@dataclass(frozen=True, slots=True)
class LoadPacking:
    """A form for weights that are packed while they are loaded, by MLX's names."""

    mode: str
    bits: int
    group_size: int

    @property
    def scales_are_floats(self) -> bool:
        """Whether each group has a scale and an offset in the form of the rows, or a byte."""
        return self.mode == "affine"

    def words_nbytes(self, values: int) -> int:
        """Return what packed values take."""
        return values * self.bits // 8

    def nbytes(self, values: int, item_nbytes: int) -> int:
        """Return what packed values and their scales take where rows have so many bytes a value."""
        scale_nbytes = 2 * item_nbytes if self.scales_are_floats else 1
        return self.words_nbytes(values) + values // self.group_size * scale_nbytes


POLICY: Final[Mapping[Weights, LoadPacking]] = MappingProxyType(
    {
        Weights.Q8: LoadPacking("affine", 8, 64),
        Weights.Q4: LoadPacking("affine", 4, 64),
        Weights.MXFP8: LoadPacking("mxfp8", 8, 32),
        Weights.MXFP4: LoadPacking("mxfp4", 4, 32),
        Weights.NVFP4: LoadPacking("nvfp4", 4, 16),
    }
)

KEPT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "embeddings": ("embed_tokens",),
        "heads": ("lm_head",),
        "routers": ("gate", "router"),
        "norms": ("norm",),
        "what makes keys and values of latents": ("kv_b_proj", "embed_q", "unembed_out"),
    }
)
"""What the names of modules end with whose weights are not packed."""

GROUP_SIZES: Final = tuple(sorted({packing.group_size for packing in POLICY.values()}))

_KEPT_ENDS = tuple(end for ends in KEPT.values() for end in ends)


def packs(name: str, shape: Sequence[int], *, group_size: int) -> bool:
    """Tell whether a weight in numbers is packed in such groups, by its name and shape."""
    module = name.removesuffix(".weight")
    # Experts in one tensor may be named without `.weight`; their biases are two-dimensional.
    matrix = len(shape) >= 2 if module != name else len(shape) >= 3
    return matrix and shape[-1] % group_size == 0 and not module.endswith(_KEPT_ENDS)


def packable_values(weights: Sequence[tuple[str, Sequence[int]]], *, group_size: int) -> int:
    """Return how many values of such weights, by names and shapes, are packed in such groups."""
    return sum(
        math.prod(shape) for name, shape in weights if packs(name, shape, group_size=group_size)
    )
