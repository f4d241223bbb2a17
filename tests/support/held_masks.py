"""Constraints whose masks take long: by a gate that a test opens, and grammars that really do."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from llguidance import LLMatcher

from mlxd_worker.engine.masks.constraint import Constraint, Matcher

GO_S = 120.0
_SLOW = "s ::= s s s s | s s | [a-z ]* | [a-z]+ s"
"""Each byte of output may be read in more ways than the one before; a mask then takes seconds."""
SLOW_AT_ONCE = f"root ::= s*\n{_SLOW}"
SLOW_BEHIND = f'root ::= "{"ab" * 40}" s*\n{_SLOW}'
"""Where no trial comes to."""


@dataclass(slots=True)
class Gate:
    """Where one mask is held."""

    at: int = 3
    """So many masks are made before."""
    error: Exception | None = None
    """What the mask fails with once it is let go on."""
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        """Wait to be told, where a thread stands in the middle of a mask."""
        self.reached.set()
        assert self.go.wait(GO_S)
        self.left.set()
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class HeldConstraint(Constraint):
    """A constraint of which each row's mask number `gate.at` is held."""

    gate: Gate = field(default_factory=Gate)

    def start(self) -> Matcher:
        """Return a matcher that is held."""
        return _HeldMatcher(self, self.prototype.deep_copy(), self.gate)


class _HeldMatcher(Matcher):
    def __init__(self, constraint: Constraint, native: LLMatcher, gate: Gate) -> None:
        super().__init__(constraint, native)
        self._gate = gate

    def mask(self) -> bytes:
        if self._mask is None and self.masks == self._gate.at:
            self._gate.pass_through()
        return super().mask()


def hold_masks(
    constraint: Constraint, gate: Gate, *, mask_s: float | None = None
) -> HeldConstraint:
    """Return the constraint with a gate before one mask, and a limit of its own for each."""
    return HeldConstraint(
        constraint.prototype,
        constraint.first_mask,
        constraint.field,
        mask_s=constraint.mask_s if mask_s is None else mask_s,
        turns=constraint.turns,
        gate=gate,
    )
