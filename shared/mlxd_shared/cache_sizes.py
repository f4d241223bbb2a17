"""What the caches of a model take, by kind, from sizes that its config.json states. Pure.

Invariants:
- Sizes are in values and become bytes only with a form: one model is reckoned in several.
- Both who plans a load and who carries it out reckon with these very sums.
- A quantised group lies within one head of one position, so a group size divides the head's width.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_shared.requests import KVFormat

KV_GROUP_VALUES = (64, 32)
"""Values that share one scale and one bias, the first that divides a head's width."""

KV_BITS = {KVFormat.Q8: 8, KVFormat.Q4: 4}

RECURRENT_VALUE_NBYTES = 4
"""Recurrent states are float32 whatever the model computes in."""


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
    head_dim: int
    """Width of one head's keys, and of its values."""
    windows: tuple[WindowedLayers, ...] = ()
    """Layers with a sliding window, one entry a window."""
    recurrent_values_per_row: int = 0
    """Float32 values of one row's recurrent and convolution states over all layers."""

    def kv_token_nbytes(self, kv_format: KVFormat, *, item_nbytes: int) -> int:
        """Return the bytes of one position in the layers that remember every position.

        item_nbytes: bytes of one value as the model computes. The head's width must be one that
        `kv_group_values` accepts where the format is quantised.
        """
        return kv_nbytes(
            self.kv_values_per_token, kv_format, head_dim=self.head_dim, item_nbytes=item_nbytes
        )


def kv_group_values(head_dim: int) -> int | None:
    """Return how many values share a scale; None where heads of this width cannot be quantised."""
    return next((group for group in KV_GROUP_VALUES if head_dim % group == 0), None)


def kv_nbytes(values: int, kv_format: KVFormat, *, head_dim: int, item_nbytes: int) -> int:
    """Return the bytes of `values` keys or values, whole heads of `head_dim`.

    Quantised: `bits / 8` bytes a value, and a scale and a bias of `item_nbytes` for each group.
    """
    bits = KV_BITS.get(kv_format)
    if bits is None:
        return values * item_nbytes
    group = kv_group_values(head_dim)
    assert group is not None, "the load refuses such a width"
    return values * bits // 8 + 2 * (values // group) * item_nbytes
