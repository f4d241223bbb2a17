"""What a stream's output must match: compiled once, and followed token by token by each row.

Invariants:
- A matcher belongs to one row and to the engine thread. Rows of one constraint share nothing that
  changes.
- A mask allows exactly the tokens that a complete output may go on with, and those that end the
  text where it is complete. A token without text is never allowed.
- A step's masks are made together, by threads of the library.
- The library does not raise: a matcher that it gives up on is found out after each call, and fails
  its own row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLExecutor, LLMatcher

from mlxd_shared.errors import InvalidRequest
from mlxd_worker.constraints.limits import is_beyond_limits, reason


class ConstraintFault(Exception):
    """The library has given up on a row's constraint, for a reason of its own."""


@dataclass(frozen=True, slots=True)
class MaskSize:
    """How large masks are, in bytes."""

    used_nbytes: int
    """For the model's vocabulary, in whole 32-bit words."""
    made_nbytes: int
    """As the library makes them: it may know of a token more."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled constraint for one vocabulary. Never changed; rows start from copies."""

    prototype: LLMatcher
    size: MaskSize

    def start(self) -> Matcher:
        """Return a matcher at the beginning of the output; engine thread."""
        return Matcher(self.prototype.deep_copy(), self.size)


class Matcher:
    """Follows one row's output. One owner: the engine thread."""

    __slots__ = ("_mask", "native", "size")

    def __init__(self, native: LLMatcher, size: MaskSize) -> None:
        self.native = native
        self.size = size
        self._mask: memoryview | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the output so far matches as a whole."""
        return self.native.is_accepting()

    @property
    def is_over(self) -> bool:
        """Whether the output is complete and no token can follow."""
        return self.native.is_stopped() and not self.native.is_error()

    @property
    def has_mask(self) -> bool:
        """Whether the next mask is made already."""
        return self._mask is not None

    def mask(self) -> memoryview:
        """Return the tokens allowed next, packed as `AllowedTokens` says.

        Raises:
            InvalidRequest: to go on takes more than the library's bounds allow.
            ConstraintFault: the library has given up for another reason.
        """
        if self._mask is None:
            self.give(memoryview(self.native.compute_bitmask()))
        self._check()
        assert self._mask is not None
        return self._mask

    def give(self, mask: memoryview) -> None:
        """Take the next mask, which somebody else has had the library make."""
        self._mask = mask[: self.size.used_nbytes]

    def accept(self, token_id: int) -> None:
        """Go on with a token that the mask allowed.

        Raises:
            InvalidRequest: to go on takes more than the library's bounds allow.
            ConstraintFault: the library has given up for another reason.
        """
        self._mask = None
        self.native.consume_token(token_id)
        self._check()

    def try_accept(self, token_id: int) -> bool:
        """Go on with a token of which nobody knows that the mask allows it; False if it does not.

        Raises:
            InvalidRequest, ConstraintFault: as `accept`.
        """
        if not self.native.validate_tokens([token_id]):
            return False
        self.accept(token_id)
        return True

    def _check(self) -> None:
        if not self.native.is_error():
            return
        message = self.native.get_error()
        if is_beyond_limits(message):
            raise InvalidRequest.of("response_format", f"too much at once: {reason(message)}")
        raise ConstraintFault(reason(message))


class MaskMaker:
    """Makes the masks of one step's rows side by side. One owner: the engine thread."""

    def __init__(self, threads: int) -> None:
        """Use so many threads; they are started with the first step that has work for them."""
        self._threads = threads
        self._executor: LLExecutor | None = None

    def make(self, matchers: Sequence[Matcher]) -> None:
        """Give each matcher its next mask; what goes wrong with one, its own `mask` tells."""
        todo = [matcher for matcher in matchers if not matcher.has_mask]
        if len(todo) < 2 or self._threads < 2:
            return  # each is made when it is asked for
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        size_nbytes = todo[0].size.made_nbytes
        buffer = bytearray(size_nbytes * len(todo))
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.native, index) for index, matcher in enumerate(todo)],
            address,
            size_nbytes,
            len(todo),
        )
        whole = memoryview(buffer)
        for index, matcher in enumerate(todo):
            matcher.give(whole[index * size_nbytes : (index + 1) * size_nbytes])
