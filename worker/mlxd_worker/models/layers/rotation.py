"""Rotating queries and keys by their positions, one way a kind of layer.

Invariants:
- What a config multiplies queries and keys by (`RopeConfig.gain`) is not in here: a head that
  rotates whole has it in the scale of its scores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.models.layers.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """One way to rotate the first `dims` values of a head."""

    config: RopeConfig
    dims: int
    table: mx.array | None
    """Each pair's tokens per radian, float32; None where the base alone says it."""

    def __call__(self, heads: mx.array, offsets: mx.array) -> mx.array:
        """Rotate `[N, heads, width, head_dim]`; row i's first position is `offsets[i]`; lazy."""
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
