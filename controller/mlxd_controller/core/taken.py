"""What a load makes of stored tensors, as far as it decides what the load needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_models.sizes.packing_on_load import POLICY
from mlxd_shared.domain.requests import Weights


@dataclass(frozen=True, slots=True)
class Taken:
    """One tensor as a load makes it; `joined` of several that are stored apart."""

    values: int
    stored_bytes: int
    joined: bool
    later_values: int = 0
    """Those of all tensors that are taken after it."""
    later_bytes: int = 0
    """The same, as they live where they live as stored."""
    kept_bytes: int | None = None
    """What it takes where it lives as stored, unless that is as many bytes as it has there."""

    def beyond_bytes(self, form_bytes: int | None) -> int:
        """Return by how much a load is beyond the finished weights while this one is made.

        There are then the tensor as it is stored, and, where it is put together, its parts in the
        form, of so many bytes a value; what is taken later is not there. None is as stored.
        """
        as_stored = self.stored_bytes if self.kept_bytes is None else self.kept_bytes
        made = as_stored if form_bytes is None else self.values * form_bytes
        converted = 0 if made == self.stored_bytes else self.stored_bytes
        later = self.later_bytes if form_bytes is None else self.later_values * form_bytes
        return converted + (made if self.joined else 0) - later

    def beyond_in(self, weights: Weights, item_bytes: int) -> int:
        """Return the same by the form of the weights, and what a number takes in it."""
        if weights in POLICY:  # beside what is packed there is what it was, in no other form
            return self.stored_bytes * (2 if self.joined else 1)
        return self.beyond_bytes(None if weights is Weights.STORED else item_bytes)


@dataclass(frozen=True, slots=True)
class Packable:
    """What is packed while loading in groups of one size, in values."""

    values: int
    unpacked_values: int
    """The most that is unpacked at once then, of these and of what is stored packed."""
