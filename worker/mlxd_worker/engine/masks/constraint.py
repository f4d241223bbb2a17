"""What a stream's output must match: compiled once, and followed token by token by each row.

Invariants:
- A matcher belongs to one row. While its row waits for an `Advance` it belongs to the thread that
  performs that, otherwise to the engine thread.
- Matchers of one constraint share the library's lock, which it holds for the whole of a mask, and
  waits for with the interpreter where it consumes a token: that stopped every thread. So they take
  turns (`Turns`), waited for without the interpreter, and never on the engine thread.
- A mask allows exactly the tokens that a complete output may go on with, and those that end the
  text where it is complete. A token without text is never allowed.
- No token is consumed that a mask has not allowed: the library bounds by its own counts what it
  does for a mask (`limits_of`), and so what a token takes that is in one. A resumed stream meets
  the same bounds as the stream that it continues.
- The library does not raise: a matcher that it gives up on is found out after each call, and fails
  its own row.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field as filled
from functools import cache
from typing import Final
from weakref import WeakSet

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.engine.masks.advance import Place
from mlxd_worker.engine.masks.limits import is_beyond_limits, is_full, reason


class ConstraintFault(Exception):
    """The library has given up on a row's constraint, for a reason of its own."""


class Turns:
    """What the rows of one constraint share: one at a time is in the library."""

    __slots__ = ("full", "lock", "slow")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.full = False
        """Whether they have met as many states as the library keeps: to no row it gives more."""
        self.slow: WeakSet[Matcher] = WeakSet()
        """Those whose masks keep the others waiting, without streams that have gone."""


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """What the library (1.9.1) allows besides, where a token that is named by its id may follow."""

    end_ids: tuple[int, ...]
    """The ids that end a text, complete or not."""
    marker_ids: tuple[int, ...]
    """Those whose first byte is 0xFF, with which it spells such a token; no text has that byte."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled constraint for one vocabulary. Rows start from copies, and take turns."""

    prototype: LLMatcher
    first_mask: bytes
    """What any output may begin with, packed as `AllowedTokens` says; all masks are as long."""
    field: str = "response_format"
    """What it is called on the wire."""
    named: NamedTokens | None = None
    """What the library allows too much where the grammar names tokens by their ids; else None."""
    mask_s: float = config.CONSTRAINT_MASK_S
    """So long a row waits for one mask, by the clock."""
    stream_s: float = config.CONSTRAINT_STREAM_S
    """What all masks of a row may take of a processor's time."""
    turns: Turns = filled(default_factory=Turns, compare=False, repr=False)

    def start(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        return Matcher(self, self.prototype.deep_copy())

    def trim(self, mask: bytes, native: LLMatcher) -> bytes:
        """Return a mask of the library's in the vocabulary's length, without ends too early."""
        return trim(mask, native, self.named, nbytes=len(self.first_mask))


def trim(mask: bytes, native: LLMatcher, named: NamedTokens | None, *, nbytes: int) -> bytes:
    """Return the first bytes of a mask, without what the library allows too much."""
    if named is None or native.is_error():
        return mask[:nbytes]
    too_early = () if native.is_accepting() else named.end_ids
    kept = bytearray(mask[:nbytes])
    for token_id in (*named.marker_ids, *too_early):
        kept[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return bytes(kept)


class Matcher:
    """Follows one row's output. One owner at a time: the engine thread, or who advances it."""

    __slots__ = (
        "__weakref__", "_mask", "_recent_s", "constraint", "masks", "native", "spent_s",
    )  # fmt: skip

    def __init__(self, constraint: Constraint, native: LLMatcher) -> None:
        self.constraint = constraint
        self.native = native
        self.masks = 0
        """How many masks it has made."""
        self.spent_s = 0.0
        """What they have taken of a processor's time."""
        self._recent_s = 0.0
        self._mask: bytes | None = constraint.first_mask

    is_awake: Final = True
    """Whether a mask is in force."""
    may_wake: Final = False

    @property
    def is_over(self) -> bool:
        """Whether the output is complete and no token can follow."""
        return self.native.is_stopped() and not self.native.is_error()

    @property
    def is_slow(self) -> bool:
        """Whether its masks take longer than other rows would wait for.

        As its last ones did, the very last half of it all: hundreds of quick masks before them are
        no reason to wait for each until the average of all has noticed. Or as those do of another
        row of its constraint, since it has to wait for that one's turns.
        """
        return len(self.constraint.turns.slow) > 0

    def mask(self) -> bytes:
        """Return the tokens allowed next, packed as `AllowedTokens` says.

        Raises:
            InvalidRequest: to go on takes more than the bounds allow.
            ConstraintFault: the library has given up for another reason.
        """
        if self._mask is None:
            # What is over has its mask at hand, and may be asked for it by the engine thread.
            with nullcontext() if self.is_over else self.constraint.turns.lock:
                begun_s = time.thread_time()
                mask = self.native.compute_bitmask()
                self._check()
                self.note(time.thread_time() - begun_s)
            self._mask = self.constraint.trim(mask, self.native)
            if self.spent_s > self.constraint.stream_s:
                raise self.too_slow(f"{self.constraint.stream_s:g} s of a processor's time in all")
        return self._mask

    def note(self, took_s: float) -> None:
        """Count a mask that took so much of a processor's time."""
        self.masks += 1
        self.spent_s += took_s
        self._recent_s = (self._recent_s + took_s) / 2
        if self._recent_s > config.CONSTRAINT_QUICK_MASK_S:
            self.constraint.turns.slow.add(self)
        else:
            self.constraint.turns.slow.discard(self)

    def accept(self, token_id: int) -> None:
        """Go on with a token that the mask allowed.

        Raises:
            InvalidRequest: to go on takes more than the bounds allow.
            ConstraintFault: the library has given up for another reason.
        """
        self._mask = None
        with self.constraint.turns.lock:
            if self.is_slow:
                _consume_apart(self.native, token_id)
            else:
                self.native.consume_token(token_id)
        self._check()

    def try_accept(self, token_id: int) -> bool:
        """Advance by a token that the mask may not allow; False if it does not.

        Raises:
            InvalidRequest, ConstraintFault: as `accept`.
        """
        if not self.mask()[token_id >> 3] >> (token_id & 7) & 1:
            return False
        self.accept(token_id)
        return True

    def place(self) -> Place:
        """Return where it is; of one that nothing is drawn from, without a mask."""
        return Place(mask=self._mask or b"")

    def leave(self) -> None:
        """Release all waiters: its row cannot continue, even if it is still referenced."""
        self.constraint.turns.slow.discard(self)

    def too_slow(self, limit: str) -> InvalidRequest:
        """Return the error about masks that take more than a limit of ours."""
        problem = f"takes too long to follow: its masks, {self.masks} so far, exceed {limit}"
        return InvalidRequest.of(self.constraint.field, problem)

    def _check(self) -> None:
        if not self.native.is_error():
            return
        message = self.native.get_error()
        if is_full(message):
            self.constraint.turns.full = True
        if is_beyond_limits(message):
            problem = f"too much at once: {reason(message)}"
            raise InvalidRequest.of(self.constraint.field, problem)
        raise ConstraintFault(reason(message))


@cache
def _apart() -> LLExecutor:
    """Return a thread of the library's own."""
    return LLExecutor(1)


@cache
def _nothing() -> LLMatcher:
    """Return a matcher that takes no token."""
    return LLMatcher(LLTokenizer("byte"), "", log_level=0)


def _consume_apart(native: LLMatcher, token_id: int) -> None:
    """Go on with a token while other threads have the interpreter.

    The library keeps it where a single matcher is to go on, and gives it up where several are.
    """
    _apart().consume_token_par([(native, token_id), (_nothing().deep_copy(), token_id)])
