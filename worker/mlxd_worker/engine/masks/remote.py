"""A constraint that another process has compiled and follows: its masks come ready made.

Invariants:
- It consumes no token and makes no mask: between two places that it is told of, it stands still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.engine.masks.advance import Place


@dataclass(frozen=True, slots=True)
class RemoteConstraint:
    """What is known of such a constraint. Immutable."""

    first_mask: bytes
    """What any output may begin with, packed as `AllowedTokens` says."""
    field: str
    """What it is called on the wire."""
    mask_s: float = config.CONSTRAINT_MASK_S

    def start(self) -> RemoteMatcher:
        """Return a matcher at the beginning of the output."""
        return RemoteMatcher(self)


class RemoteMatcher:
    """Stands where the matcher of the same row in another process was when that was told."""

    __slots__ = ("__weakref__", "_mask", "constraint")

    def __init__(self, constraint: RemoteConstraint) -> None:
        self.constraint = constraint
        self._mask = constraint.first_mask

    is_awake: Final = True
    """Whether a mask is in force."""
    may_wake: Final = False
    is_over: Final = False
    """Whoever follows the output knows, and tells it with what became of a token."""
    is_slow: Final = False

    def mask(self) -> bytes:
        """Return the tokens allowed next, packed as `AllowedTokens` says."""
        assert self._mask, "nothing is drawn here"
        return self._mask

    def move_to(self, place: Place) -> None:
        """Stand at `place`."""
        self._mask = place.mask

    def place(self) -> Place:
        """Return where it was last told to be."""
        return Place(mask=self._mask)

    def try_accept(self, token_id: int) -> bool:
        """Refuse: tokens are followed elsewhere."""
        raise AssertionError(f"token {token_id} was to be followed where masks are told")

    def leave(self) -> None:
        """Do nothing: nobody waits for it."""

    def too_slow(self, limit: str) -> InvalidRequest:
        """Return an error about masks that take more than a limit of ours."""
        return InvalidRequest.of(self.constraint.field, f"its masks exceed {limit}")
