"""Which weights are packed while they are loaded, where that is asked for. Pure.

Invariants:
- Embeddings, heads, routers, norms and what makes keys and values of latents are kept as numbers:
  they are small, or an error in them is seen in every token. What is stored packed stays so.
- Numbers are what a checkpoint stores as floats of 8 bits or more, not yet packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from mlxd_models.families.common.packing import ON_LOAD

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

GROUP_SIZES: Final = tuple(sorted({packing.group_size for packing in ON_LOAD.values()}))

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
