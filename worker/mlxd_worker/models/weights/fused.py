"""A layer's products with what stands before and after them, in as few operations as there are.

Invariants:
- Each function says what it computes in MLX's own operations; a kernel that does the same is used
  where it serves.
"""

import math
from typing import Final

import mlx.core as mx

from mlxd_models.families.common.decoder import Activation
from mlxd_models.families.common.experts import GateClamp
from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.exponentials import times_sigmoid
from mlxd_worker.kernels.products import rows_times
from mlxd_worker.kernels.products import serves as served_by_rows
from mlxd_worker.kernels.vector import Norm, row_times
from mlxd_worker.kernels.vector import serves as served_by_row
from mlxd_worker.machine.lanes import side_by_side
from mlxd_worker.models.weights.linear import Linear, Projection

_FLOAT16_MAX: Final = 65504.0
_GELU_SLOPE: Final = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE: Final = 0.044715
"""The curve of GELU by tanh."""


def normed_times(rows: mx.array, norm: Norm, projection: Projection) -> mx.array:
    """Return the projection of the normalised rows."""
    plain = _plain(projection)
    if plain is not None and served_by_row(rows, plain.weight, norm):
        return row_times(rows, plain.weight, norm=norm)
    normed = mx.fast.rms_norm(rows, norm.weight, norm.eps)
    if plain is not None and served_by_rows(normed, plain.weight):
        return rows_times(normed, plain.weight)
    return projection(normed)


def add_projection(
    residual: mx.array, rows: mx.array, projection: Projection, norm: Norm | None = None
) -> mx.array:
    """Return `residual` + the projection of `rows`, normalised where `norm` says so."""
    if norm is not None:
        out = mx.fast.rms_norm(projection(rows), norm.weight, norm.eps)
        return bounded_sum(residual, out)
    plain = _plain(projection)
    if plain is not None and served_by_row(rows, plain.weight):
        return row_times(rows, plain.weight, residual=residual)
    if plain is not None and served_by_rows(rows, plain.weight):
        return rows_times(rows, plain.weight, residual=residual)
    if plain is not None and runs_cuda():
        return mx.addmm(residual, rows, plain.across)
    return residual + projection(rows)


def bounded_sum(left: mx.array, right: mx.array) -> mx.array:
    """Return the sum; in float16 what is beyond its range ends at the range's end."""
    if left.dtype != mx.float16:
        return left + right
    exact = left.astype(mx.float32) + right.astype(mx.float32)
    return mx.clip(exact, -_FLOAT16_MAX, _FLOAT16_MAX).astype(mx.float16)


def gate_projection(
    rows: mx.array,
    norm: Norm,
    gate_up: Projection,
    *,
    width: int,
    activation: Activation = Activation.SILU,
) -> mx.array:
    """Return `act(g) * u`, g and u being the halves of the normalised rows' projection."""
    plain = _plain(gate_up)
    silu = activation is Activation.SILU
    if silu and plain is not None and served_by_row(rows, plain.weight, norm):
        return row_times(rows, plain.weight, norm=norm, gated=True)
    normed = mx.fast.rms_norm(rows, norm.weight, norm.eps)
    if silu and plain is not None and served_by_rows(normed, plain.weight):
        return rows_times(normed, plain.weight, gated=True)
    both = gate_up(normed)
    return gated_halves(both, width=width, activation=activation)


def gated_halves(
    both: mx.array, *, width: int, activation: Activation = Activation.SILU
) -> mx.array:
    """Return `act(g) * u` where g and u are the halves, of `width`, of each row."""

    def activate(part: slice) -> mx.array:
        gate, up = both[part, :width], both[part, width:]
        return times_sigmoid(gate * up, _steepness(gate, activation))

    return side_by_side(activate, count=len(both), values=len(both) * width, axis=0)


def clamped_halves(both: mx.array, *, width: int, clamp: GateClamp) -> mx.array:
    """Return `(u + 1) * g * sigmoid(slope * g)`, g and u being each row's halves, bounded."""

    def activate(part: slice) -> mx.array:
        gate = mx.minimum(both[part, :width], clamp.limit)
        up = mx.clip(both[part, width:], -clamp.limit, clamp.limit)
        return times_sigmoid(gate * (up + 1), clamp.slope * gate)

    return side_by_side(activate, count=len(both), values=len(both) * width, axis=0)


def _steepness(gate: mx.array, activation: Activation) -> mx.array:
    """Return what the gate is multiplied by the sigmoid of."""
    if activation is Activation.SILU:
        return gate
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
    return _GELU_SLOPE * (gate + _GELU_CUBE * (gate * gate * gate))


def logits_of(hidden: mx.array, head: Projection) -> mx.array:
    """Return the head's products as float32."""
    plain = _plain(head)
    if plain is not None and served_by_row(hidden, plain.weight):
        return row_times(hidden, plain.weight, wide=True)
    if plain is not None and served_by_rows(hidden, plain.weight):
        return rows_times(hidden, plain.weight, wide=True)
    return head(hidden).astype(mx.float32)


def _plain(projection: Projection) -> Linear | None:
    """Return a projection that is a matrix and nothing else; None for any other."""
    return projection if isinstance(projection, Linear) and projection.bias is None else None
