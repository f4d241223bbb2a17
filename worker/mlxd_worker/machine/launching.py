"""Whether MLX puts a CUDA device's kernels into graphs, or launches each by itself.

MLX decides that once in a process, by its environment, when the first kernel is to run. In a graph
a plain kernel is a node, which costs the host less than a launch, but each of MLX's matrix products
is captured into a graph of its own first. Which is faster depends on what bounds a step, the host
or the device, and on who multiplies.

Measured on an H200: with 128 rows a model of 8 B has 7 % more tokens a second without graphs, with
one row 2 % (decision 0111). One of 0.6 B, whose layers' products are kernels of ours, had 17 % more
with graphs on one machine (decision 0113).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

from mlxd_models.families.common.family import Footprint
from mlxd_models.fit.described import Life
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.ops.logs import get_logger

GRAPHS_VARIABLE: Final = "MLX_USE_CUDA_GRAPHS"
"""Read by MLX."""

MANY_ROWS: Final = 64
"""Between 32 rows, where a model of 0.6 B was as fast either way while MLX multiplied, and the 128
that were measured."""

LARGE_NBYTES: Final = 8 << 30
"""Weights of so many bytes take a device longer to read than a host takes to launch the kernels of
one row: by arithmetic 2 ms, where launches took 1.5."""

_log = get_logger("load")


def captures_products(footprint: Footprint, life: Life, *, own_nbytes_max: int) -> bool:
    """Return whether a model's layers have products that MLX would capture. Pure.

    own_nbytes_max: up to how many bytes a matrix of halves is multiplied by a kernel of ours.
    """
    halves = not life.packed and life.form is not FloatType.F32
    nbytes = footprint.plain_matrix * life.form.nbytes
    return not (halves and 0 < nbytes <= own_nbytes_max)


def choose_launching(
    environ: MutableMapping[str, str], *, weights_nbytes: int, rows_max: int, captures: bool = True
) -> None:
    """Have MLX launch kernels by themselves where that is faster.

    captures: whether layers have products of MLX's (`captures_products`).
    `environ` is this process's; what it says already stands, an operator's word or what an earlier
    load chose. Call it before anything runs on the device; afterwards it changes nothing.
    """
    said = environ.get(GRAPHS_VARIABLE)
    if said is None:
        alone = weights_nbytes >= LARGE_NBYTES or (captures and rows_max >= MANY_ROWS)
        environ[GRAPHS_VARIABLE] = "0" if alone else "1"
    _log.info("launches", graphs=environ[GRAPHS_VARIABLE], said_before=said is not None)
