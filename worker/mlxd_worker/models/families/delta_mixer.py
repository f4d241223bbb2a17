"""A gated delta layer: convolution, gated delta rule, gated norm; what takes attention's place.

Invariants:
- Products are in the model's type; everything between them is float32, and the result goes back.
- What a row needs of its past is the recurrence's state (float32) and the convolution's last inputs
  (the model's type); both are the cache's, before and after.
- The convolution is `kernel` shifted sums: on a CPU `conv1d` takes twenty times as long.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.hybrid.config import DeltaConfig
from mlxd_models.families.hybrid.tensors import DELTA_OUTPUT, GROUPED_PROJECTIONS, PROJECTIONS
from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.kernels.exponentials import silu
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.families.gated_delta import DeltaInputs, gated_delta
from mlxd_worker.models.weights.linear import Projection, Weighted, reorder_outputs
from mlxd_worker.models.weights.reader import Reader

LENGTH_EPS = 1e-6
"""Added to the squared length of a key or a query before it is divided by."""


@dataclass(frozen=True, slots=True)
class DeltaMixer(Weighted):
    """One layer's weights. One owner: the engine thread."""

    config: DeltaConfig
    projection: Projection
    """Of a row: queries, keys, values; the gate; rates; decays."""
    convolution: mx.array
    """float32 [kernel, mixed], the oldest token's first."""
    decay: mx.array
    """float32 [value_heads], below 0: the log of what one unit of time leaves."""
    time_bias: mx.array
    """float32 [value_heads]."""
    norm: Norm
    """[value_dim]."""
    output: Projection

    def __call__(self, rows: mx.array, cache: RecurrentCache, plan: StepPlan) -> mx.array:
        """Map flat rows `[N * width, hidden]` to as many, and move the rows' states on; lazy."""
        config, dtype = self.config, rows.dtype
        tail, state = cache.states(plan)
        joined = self.projection(rows).reshape(-1, plan.width, config.projected)
        mixed, gate, rates, times = mx.split(
            joined,
            [config.mixed, config.mixed + config.values, config.projected - config.value_heads],
            axis=-1,
        )
        history = mx.concatenate([tail, mixed], axis=1)
        inputs = self._inputs(self._convolve(history, plan.width), rates, times)
        result, state = gated_delta(inputs, state)
        cache.put(plan, (history[:, plan.width :], state))

        normed = mx.fast.rms_norm(result, self.norm.weight, self.norm.eps)
        gated = normed * silu(gate.astype(mx.float32).reshape(result.shape))
        gated = cache.write_result(gated.astype(dtype).reshape(rows.shape[0], -1))
        return self.output(gated)

    def _convolve(self, history: mx.array, width: int) -> mx.array:
        """Return float32 [N, width, mixed] from inputs [N, kernel - 1 + width, mixed]."""
        history = history.astype(mx.float32)
        taps = self.convolution
        total = history[:, :width] * taps[0]
        for age in range(1, self.config.kernel):
            total = total + history[:, age : age + width] * taps[age]
        return silu(total)

    def _inputs(self, mixed: mx.array, rates: mx.array, times: mx.array) -> DeltaInputs:
        config = self.config
        rows, width, _ = mixed.shape
        heads = mixed[..., : 2 * config.keys]
        heads = heads.reshape(rows, width, 2 * config.key_heads, config.key_dim)
        # To length one: the root mean square leaves them as long as the root of their width.
        scale = config.key_dim**-0.5
        heads = scale * mx.fast.rms_norm(heads, None, LENGTH_EPS / config.key_dim)
        values = mixed[..., 2 * config.keys :]
        spent = mx.logaddexp(times.astype(mx.float32) + self.time_bias, mx.array(0.0))
        return DeltaInputs(
            queries=scale * heads[..., : config.key_heads, :],
            keys=heads[..., config.key_heads :, :],
            values=values.reshape(rows, width, config.value_heads, config.value_dim),
            log_decays=self.decay * spent,
            rates=mx.sigmoid(rates.astype(mx.float32)),
        )


def delta_cache(config: DeltaConfig, dtype: mx.Dtype) -> RecurrentCache:
    """Return an empty cache for one layer of a model that computes in `dtype`."""
    return RecurrentCache(
        (
            RowState("tail", (config.kernel - 1, config.mixed), dtype),
            RowState("state", (config.value_heads, config.value_dim, config.key_dim), mx.float32),
        )
    )


def is_stored_by_mlx(config: DeltaConfig, weights: Reader, prefix: str) -> bool:
    """Tell whether the layer's convolution is stored as MLX has it, and not as published."""
    return weights.shape(f"{prefix}conv1d.weight") == (config.mixed, config.kernel, 1)


def take_delta(config: DeltaConfig, weights: Reader, prefix: str, *, norm_eps: float) -> DeltaMixer:
    """Take one layer's tensors; either layout of the convolution."""
    taps = weights.take_float32(f"{prefix}conv1d.weight").reshape(config.mixed, config.kernel)
    convolution = mx.contiguous(taps.T)
    decay = -mx.exp(weights.take_float32(f"{prefix}A_log"))
    mx.eval(convolution, decay)
    return DeltaMixer(
        config=config,
        projection=_take_projection(config, weights, prefix),
        convolution=convolution,
        decay=decay,
        time_bias=weights.take_float32(f"{prefix}dt_bias"),
        norm=Norm(weights.take(f"{prefix}norm.weight"), norm_eps),
        output=weights.linear([prefix + DELTA_OUTPUT]),
    )


def _take_projection(config: DeltaConfig, weights: Reader, prefix: str) -> Projection:
    if not config.grouped:
        return weights.linear([prefix + name for name in PROJECTIONS])
    stored = weights.linear([prefix + name for name in GROUPED_PROJECTIONS])
    return reorder_outputs(stored, _orders(config))


def _orders(config: DeltaConfig) -> tuple[list[int], list[int]]:
    """Return where the outputs of each grouped projection are stored, part by part.

    Of each key head: its query, its key, its values, their gates; and its rates, its decays.
    """
    shared = config.value_heads // config.key_heads
    wide = shared * config.value_dim
    return (
        _apart(config.key_heads, (config.key_dim, config.key_dim, wide, wide)),
        _apart(config.key_heads, (shared, shared)),
    )


def _apart(heads: int, widths: tuple[int, ...]) -> list[int]:
    """Return where each part of all heads is, the first part of all, then the second."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    return [
        head * sum(widths) + start + place
        for start, width in zip(starts, widths, strict=True)
        for head in range(heads)
        for place in range(width)
    ]
