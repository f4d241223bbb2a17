"""Products with packed weights, in every packing that models have, against the same in numbers.

Invariants:
- The way is the one that models take: `packed_product`, what it works around included.
- MLX's own products have no plain alternative: a fault there says what not to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, cast

import mlx.core as mx

from mlxd_models.families.common.packing import MODES, ON_LOAD, Packing
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.packed.product import packed_product, unpack_weight
from mlxd_worker.models.loader import DTYPES
from mlxd_worker.proof.judging import TOLERANCES
from mlxd_worker.proof.subjects import form_on

PRODUCT_PATHS: Final = (FastPath.PACKED_ROWS,)
"""The fast paths that are proved here."""
OUTPUTS: Final = 256
"""What the kernel for many rows asks for at least."""
WIDTH: Final = 512
"""Of inputs: several groups of every size."""
ROWS: Final = (1, 2, 8, 40, 100)
"""A row alone, and as many as MLX, or we, have other kernels for."""


def packings() -> Iterator[Packing]:
    """Yield every packing that a checkpoint may have, which those of a load are among."""
    for mode, facts in MODES.items():
        for group_size in facts.group_sizes:
            for bits in facts.bits:
                yield Packing(group_size, bits, mode)


def describe_packing(packing: Packing) -> str:
    """Return how people call a packing, and what to load with where that is one of ours."""
    forms = [
        form.value for form, recipe in ON_LOAD.items() if packing in (recipe.common, recipe.finer)
    ]
    loads = f": --weights {', '.join(forms)}" if forms else ""
    return f"{packing.mode.value}, {packing.bits} bits, groups of {packing.group_size}{loads}"


def compare_products(
    packing: Packing,
    kind: DeviceKind,
    *,
    multiply: Callable[..., mx.array] = packed_product,
    unpack: Callable[..., mx.array] = unpack_weight,
) -> str | None:
    """Return how products with a packing's weights disagree with those of its numbers, or None.

    multiply: called as `packed_product` is. unpack: as `unpack_weight` is.
    """
    form = form_on(kind)
    allowed = TOLERANCES[form].relative
    weight_key, rows_key = mx.random.split(mx.random.key(73), 2)
    size, bits, mode = packing.group_size, packing.bits, packing.mode.value
    for inputs in (size, WIDTH):
        weight = mx.random.normal((OUTPUTS, inputs), key=weight_key).astype(DTYPES[form])
        words, scales, *offsets = mx.quantize(weight, size, bits, mode=mode)
        offset = offsets[0] if offsets else None
        numbers = mx.dequantize(words, scales, offset, size, bits, mode=mode).astype(mx.float32)
        made = unpack(
            words, scales, offset, dtype=DTYPES[form], group_size=size, bits=bits, mode=mode
        )
        worst = largest_error(made, numbers)
        if not worst <= allowed:
            return f"numbers of {inputs} inputs are off by up to {worst:.2g}, at most {allowed:g}"
        for count in ROWS:
            rows = mx.random.normal((count, inputs), key=rows_key).astype(DTYPES[form])
            expected = rows.astype(mx.float32) @ numbers.T
            ours = multiply(
                rows, words, scales, offset,
                transpose=True, group_size=size, bits=bits, mode=mode,
            )  # fmt: skip
            worst = largest_error(ours, expected)
            if not worst <= allowed:  # what is no number disagrees
                what = f"{count} rows of {inputs} inputs"
                return f"{what} are off by up to {worst:.2g}, at most {allowed:g} may"
    return None


def largest_error(ours: mx.array, expected: mx.array) -> float:
    """Return by how much values are off at most, of the largest; NaN where one is no number."""
    error = mx.max(mx.abs(ours - expected)) / mx.max(mx.abs(expected))
    return cast("float", error.item())
