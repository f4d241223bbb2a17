"""What the caches of a model take, by kind, from sizes that its config.json states. Pure.

Invariants:
- Sizes are in values and become bytes only with a form: one model is reckoned in several.
- A quantised group lies within one head of one position, so a group size divides the head's width.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_models.sizes.arena_sizes import kv_tokens_bound, slots_bound
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import KVFormat

KV_GROUP_VALUES = (64, 32)
"""Values that share one scale and one bias: the first of these that divides a head's width."""

KV_BITS = {KVFormat.Q8: 8, KVFormat.Q4: 4}

UNPACKED_LAYERS = 2
"""Layers whose quantised keys and values exist unpacked at one moment."""

PACKED_PRODUCTS_ON = DeviceKind.METAL
"""The kind of device whose products read packed integers within an arena."""

RECURRENT_VALUE_NBYTES = 4
"""Recurrent states are float32 whatever the model computes in."""

RECURRENT_STEP_LAYERS = 4
"""Layers whose states, those of all rows, are there once more at a step's peak: gathered, in the
making, not yet given back (measured: 2.3 for a batch that stays, 3.2 for one that changed)."""

CONVOLVED_VALUES = 8
"""How often the width of a recurrent layer's convolution is there at once for each position, in
float32: its taps, the unit keys, the blocks (measured: 6 to 7.5 times)."""


@dataclass(frozen=True, slots=True)
class Held:
    """An amount of memory of which a part depends on the form that the model computes in."""

    values: int
    """Values in that form."""
    fixed_nbytes: int
    """Bytes that are the same in every form."""

    def __add__(self, other: Held) -> Held:
        """Return both together."""
        return Held(self.values + other.values, self.fixed_nbytes + other.fixed_nbytes)

    def nbytes(self, item_nbytes: int) -> int:
        """Return the bytes where one value of the form takes `item_nbytes`."""
        return self.values * item_nbytes + self.fixed_nbytes


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers that remember only the last `window` positions, fewer than the model's context."""

    window: int
    kv_values_per_token: int
    """Keys and values of one position over all of them."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What one model's layers remember of a row, in values."""

    kv_values_per_token: int
    """Keys and values of one position over all layers that remember every position."""
    kv_heads: int
    """Heads of keys, and of values, in one layer."""
    head_dim: int
    """Width of one head's keys, and of its values."""
    windows: tuple[WindowedLayers, ...] = ()
    """Layers with a sliding window, one entry a window."""
    recurrent_values_per_row: int = 0
    """Float32 values of one row's recurrent and convolution states over all layers."""
    recurrent_layers: int = 0
    """Layers that these are of, each the same."""
    latent: bool = False
    """Whether a position's entry is one latent, which its keys and its values are made of."""
    foreign: bool = False
    """Whether another library's attention reads them."""

    def kv_format_problem(self, kv_format: KVFormat | None) -> str | None:
        """Return why this model's keys and values cannot live in a format; None where they can."""
        if kv_format not in KV_BITS:
            return None
        if self.latent:
            return "this model keeps latents, which stay as they are"
        if self.foreign:
            return "mlx-lm's attention reads this model's keys and values, as they are"
        if not self.kv_values_per_token:
            return "no layer of this model keeps all positions; windows and states stay as they are"
        if kv_group_values(self.head_dim) is not None:
            return None
        groups = " or ".join(str(group) for group in KV_GROUP_VALUES)
        return f"heads of {self.head_dim} values do not divide into groups of {groups}"

    def most_held(
        self, *, context_max: int, rows_max: int, kv_format: KVFormat, on_cpu: bool
    ) -> Held:
        """Return the most that rows ever take, however they come and go: arenas and states.

        A step replaces states; what it needs for that is included. Where all that is kept of
        positions slides, a CPU has arenas of one class, and no more slots than rows.
        """
        tokens, slots = kv_tokens_bound(context_max, rows_max), slots_bound(rows_max)
        if on_cpu and not self.kv_values_per_token:
            slots = rows_max
        # A slot holds no more of a window than its capacity, and all capacities are `tokens`; a
        # window that no row outgrows is no ring.
        sliding = sum(
            (min(tokens, slots * layers.window) if layers.window < context_max else tokens)
            * layers.kv_values_per_token
            for layers in self.windows
        )
        kv = kv_held(tokens * self.kv_values_per_token, kv_format, head_dim=self.head_dim)
        return kv + Held(sliding, rows_max * self._states_nbytes())

    def _states_nbytes(self) -> int:
        """Return what a row's states take, those included that a step holds besides."""
        if not self.recurrent_layers:
            return 0
        per_layer = self.recurrent_values_per_row // self.recurrent_layers
        values = self.recurrent_values_per_row + RECURRENT_STEP_LAYERS * per_layer
        return values * RECURRENT_VALUE_NBYTES

    def unpacked_values(self, tokens: int, kv_format: KVFormat) -> int:
        """Return the values alive at once where `tokens` quantised positions are unpacked.

        One layer's are read while the next one's are made; measured: 2.0 layers.
        """
        layer = 2 * self.kv_heads * self.head_dim
        return UNPACKED_LAYERS * layer * tokens if kv_format in KV_BITS else 0


def kv_group_values(head_dim: int) -> int | None:
    """Return how many values share a scale; None where heads of this width cannot be quantised."""
    return next((group for group in KV_GROUP_VALUES if head_dim % group == 0), None)


def kv_held(values: int, kv_format: KVFormat, *, head_dim: int) -> Held:
    """Return what keys or values take, whole heads of `head_dim`.

    Quantised: `bits / 8` bytes a value; and a scale and a bias a group, in the model's form.
    """
    bits = KV_BITS.get(kv_format)
    if bits is None or not values:
        return Held(values, 0)
    group = kv_group_values(head_dim)
    assert group is not None, "the load refuses such a width"
    return Held(2 * (values // group), values * bits // 8)


def rows_unpacked(rows_max: int, device: DeviceKind) -> int:
    """Return how many rows' quantised keys and values are unpacked at once.

    One prompt's at least, and all where a decode step cannot multiply with what is packed.
    """
    return 1 if device is PACKED_PRODUCTS_ON else rows_max
