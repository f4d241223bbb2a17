"""Passes that write in place, without the kernels that only a GPU has: for tests of what is around.

The caches here do in MLX's own operations what the kernels do.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import Chunk, StepPlan
from mlxd_worker.cache.base import LayerCache, Place
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Model
from tests.support.probing import Probe


class InPlace(KVCache):
    """Does what the kernels do: writes every token, then reads each row up to its own position."""

    @property
    def puts(self) -> bool:
        """Tell that it serves."""
        return True

    def put(
        self,
        place: Place,
        start: int,
        stop: int,
        source: Place | tuple[mx.array, ...],
        *,
        at: int = 0,
    ) -> list[mx.array]:
        """Write a row's positions, or what was read of them, where they belong."""
        if isinstance(source, Place):
            state = self.read(source, start, stop)
        else:
            state = tuple(array[at : at + 1, :, : stop - start] for array in source)
        self.write(place, start, stop, state)
        return list(self._arenas[place.arena])

    def attends_joined(self, *, heads: int) -> bool:
        """Tell that it serves."""
        return heads > 0

    def attend_joined(
        self, joined: mx.array, periods: mx.array, plan: StepPlan, *, heads: int, scale: float
    ) -> mx.array:
        """Write keys and values where the plan says, and attend."""
        (group,) = plan.groups
        assert group.targets is not None
        count, half = group.count, self.head_dim // 2
        slots, positions = group.targets[:count, 0], group.targets[:count, 1]
        places = group.targets[:count, -1]  # for rotations: positions where there are two columns
        split = joined.reshape(count, heads + 2 * self.kv_heads, self.head_dim)
        angles = (places[:, None] / periods)[:, None]
        turning = split[:, : heads + self.kv_heads]
        left, right = turning[..., :half], turning[..., half:]
        turned = mx.concatenate(
            [
                left * mx.cos(angles) - right * mx.sin(angles),
                left * mx.sin(angles) + right * mx.cos(angles),
            ],
            axis=-1,
        )
        keys, values = self._arenas[group.arena]
        keys[slots, :, positions] = turned[:, heads:]
        values[slots, :, positions] = split[:, heads + self.kv_heads :]
        self._arenas[group.arena] = [keys, values]
        mine = turned[:, :heads].reshape(count, self.kv_heads, -1, self.head_dim)
        scores = (mine * scale) @ keys[slots].swapaxes(-1, -2)
        hidden = mx.arange(group.capacity) > positions[:, None]
        shares = mx.softmax(mx.where(hidden[:, None, None], -mx.inf, scores), axis=-1)
        return (shares @ values[slots]).reshape(count, heads * self.head_dim)


class Copying(InPlace):
    """Claims the kernels that copy what a long chunk reads, where it attends under a mask."""

    @property
    def copies(self) -> bool:
        """Tell that it has them."""
        return True

    def _attend_by_kernels(self, inputs: Asked, chunk: Chunk) -> mx.array:
        del chunk
        return self._attend(inputs, (inputs.keys, inputs.values))


def compiled_in_place(
    model: Model, *, context_max: int, rows_max: int, kind: type[KVCache] = InPlace
) -> tuple[CompiledModel, RowCaches]:
    """Return the model as a GPU would run it, and the caches that it is compiled for."""
    layers: list[LayerCache | None] = []
    for layer in model.new_caches(context_max=context_max):
        assert isinstance(layer, KVCache)
        layers.append(kind(kv_heads=layer.kv_heads, head_dim=layer.head_dim, dtype=layer.dtype))
    caches = RowCaches(
        layers,
        context_max=context_max,
        rows_max=rows_max,
        bounded_shapes=True,
        keeps_spares=True,
        in_place=True,
    )
    able = Probe(model)
    able.capabilities = replace(model.capabilities, decodes_in_place=True)
    return CompiledModel(able, caches), caches
