"""When a tower's parts are evaluated: on a CPU one after another.

MLX makes room there for everything that is evaluated together before it computes any of it.
"""

import mlx.core as mx

from mlxd_worker.kernels.device import runs_cpu


def settle(values: mx.array) -> mx.array:
    """Return values, evaluated on a CPU: of what made them nothing is alive any more."""
    if runs_cpu():
        mx.eval(values)
    return values
