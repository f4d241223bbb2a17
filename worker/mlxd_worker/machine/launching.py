"""Whether MLX puts a CUDA device's kernels into graphs, or launches each by itself.

MLX decides that once in a process, by its environment, when the first kernel is to run. In a graph
a plain kernel is a node, but each matrix product is captured into a graph of its own first. Which
is faster depends on what bounds a step, the host or the device.

Measured on an H200 (decision 0111): with 128 rows a model of 0.6 B has 9 % more tokens a second
without graphs, and one of 8 B 7 %; with one row that of 0.6 B has 15 % fewer, that of 8 B 2 % more.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

from mlxd_shared.ops.logs import get_logger

GRAPHS_VARIABLE: Final = "MLX_USE_CUDA_GRAPHS"
"""Read by MLX."""

MANY_ROWS: Final = 64
"""Between 32 rows, where a model of 0.6 B is as fast either way, and the 128 that were measured."""

LARGE_NBYTES: Final = 8 << 30
"""Weights of so many bytes take a device longer to read than a host takes to launch the kernels of
one row: by arithmetic 2 ms, where launches took 1.5."""

_log = get_logger("load")


def choose_launching(
    environ: MutableMapping[str, str], *, weights_nbytes: int, rows_max: int
) -> None:
    """Have MLX launch kernels by themselves where that is faster.

    `environ` is this process's; what it says already stands, an operator's word or what an earlier
    load chose. Call it before anything runs on the device; afterwards it changes nothing.
    """
    said = environ.get(GRAPHS_VARIABLE)
    if said is None:
        alone = rows_max >= MANY_ROWS or weights_nbytes >= LARGE_NBYTES
        environ[GRAPHS_VARIABLE] = "0" if alone else "1"
    _log.info("launches", graphs=environ[GRAPHS_VARIABLE], said_before=said is not None)
