"""Rotating queries and keys by their positions, one way a kind of layer.

Invariants:
- What a config multiplies queries and keys by (`RopeConfig.gain`) is not in here: a head that
  rotates whole has it in the scale of its scores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlxd_models.families.common.rope import RopeConfig
from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.kernels.device import runs_cpu


@dataclass(frozen=True, slots=True)
class Rotation:
    """One way to rotate the first `dims` values of a head."""

    config: RopeConfig
    dims: int
    table: mx.array | None
    """Each pair's tokens per radian, float32; None where the base alone says it."""

    def __call__(self, heads: mx.array, offsets: mx.array, plan: StepPlan) -> mx.array:
        """Rotate `[N, heads, width, head_dim]`; row i's first position is `offsets[i]`; lazy.

        plan: of the pass, in which all layers share the angles where MLX would make them anew.
        """
        if self._fused(heads):
            return self._rotated(heads, offsets)
        count, width, half = heads.shape[0], heads.shape[2], self.dims // 2
        angles = partial(self._angles, offsets, width)
        cosines, sines = (
            plan.shared((name, id(self)), lambda turn=turn: turn(angles()))  # type: ignore[misc]
            for name, turn in (("cosines", mx.cos), ("sines", _signed_sines))
        )
        pairs = heads.reshape(count, -1, width, 2, half)
        return (pairs * cosines + pairs[..., ::-1, :] * sines).reshape(heads.shape)

    def _fused(self, heads: mx.array) -> bool:
        """Tell whether MLX is to do it: on a CPU it takes it apart for each layer anew."""
        plain = self.dims == heads.shape[-1] and not self.config.interleaved
        return not (plain and runs_cpu() and heads.dtype == mx.float32)

    def _angles(self, offsets: mx.array, width: int) -> mx.array:
        """Return by how many radians pairs turn, `[N, 1, width, 1, dims / 2]`."""
        positions = offsets[:, None] + mx.arange(width, dtype=offsets.dtype)
        return (positions.astype(mx.float32)[..., None] / self.periods())[:, None, :, None]

    def _rotated(self, heads: mx.array, offsets: mx.array) -> mx.array:
        return mx.fast.rope(
            heads,
            self.dims,
            traditional=self.config.interleaved,
            base=self.config.base if self.table is None else None,
            scale=self.config.position_scale,
            offset=offsets,
            freqs=self.table,
        )

    def periods(self) -> mx.array:
        """Return by how many positions each pair turns by one radian, lazy."""
        periods = self.table
        if periods is None:
            steps = mx.arange(0, self.dims, 2, dtype=mx.float32)
            periods = mx.exp(steps * (math.log(self.config.base) / self.dims))
        return periods / self.config.position_scale


def _signed_sines(angles: mx.array) -> mx.array:
    """Return what the other value of a pair counts with, `[..., 2, dims / 2]`."""
    sines = mx.sin(angles)
    return mx.concatenate([-sines, sines], axis=-2)


def rotation_of(config: RopeConfig, dims: int) -> Rotation:
    """Return the rotation that a config asks for."""
    periods = config.periods(dims)
    table = None if periods is None else mx.array(periods, dtype=mx.float32)
    return Rotation(config, dims, table)


def rotations_of(configs: Sequence[RopeConfig], dims: int) -> tuple[Rotation, ...]:
    """Return one for each config, the same object for equal ones."""
    made = {config: rotation_of(config, dims) for config in dict.fromkeys(configs)}
    return tuple(made[config] for config in configs)


def tables_of(rotations: Sequence[Rotation]) -> Mapping[str, mx.array]:
    """Return their tables by name, each once."""
    tables = {id(its.table): its.table for its in rotations if its.table is not None}
    return {
        f"rope_periods.{index}" if index else "rope_periods": table
        for index, table in enumerate(tables.values())
    }
