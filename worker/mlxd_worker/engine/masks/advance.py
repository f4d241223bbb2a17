"""A row's way to its next mask: other threads go it, and the engine thread looks how far they are.

Invariants:
- An `Advance` is made by the engine thread, which judges by what it last saw of it (`seen`) and by
  nothing else. So ranks that are told what the first one saw judge as that one does.
- Until it is done its matcher belongs to the thread that performs it alone.
- What becomes of the tokens is there before the mask behind them is (`arrived`): a stream that ends
  with them needs none, and has nothing to do with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mlxd_shared.domain.errors import InvalidRequest


class Grammar(Protocol):
    """What rows start from. Real: `Constraint`; `RemoteConstraint`, which another process has.

    Immutable.
    """

    @property
    def first_mask(self) -> bytes:
        """What any output may begin with, packed as `AllowedTokens` says."""

    @property
    def field(self) -> str:
        """What it is called on the wire."""

    @property
    def mask_s(self) -> float:
        """So long a row waits for one mask, by the clock."""

    def start(self) -> Follower:
        """Return what follows an output from its beginning."""


class Watched(NamedTuple):
    """What a sleeping grammar of calls has noticed of the text so far."""

    at_start: bool
    """Whether reasoning may begin yet."""
    reasoning: bool
    tail: bytes
    """The end of the text in which a mark may have begun."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a follower of an output is, as far as draws depend on it."""

    mask: bytes = b""
    """The tokens that are allowed next; empty where it is asleep, or nothing is drawn."""
    awake: bool = True
    watched: Watched | None = None
    """Of calls alone."""


class Follower(Protocol):
    """What follows a row's output. Real: `Matcher`, `RemoteMatcher`, and `CallMatcher` of either.

    One owner at a time: the engine thread, or who advances it.
    """

    @property
    def constraint(self) -> Grammar:
        """What the output must match."""

    @property
    def is_awake(self) -> bool:
        """Whether a mask is in force."""

    @property
    def may_wake(self) -> bool:
        """Whether the next token may put one in force together with those before it."""

    @property
    def is_over(self) -> bool:
        """Whether the output is complete and no token can follow."""

    @property
    def is_slow(self) -> bool:
        """Whether its masks take longer than other rows would wait for."""

    def mask(self) -> bytes:
        """Return the tokens allowed next; raises as `Matcher.mask`."""

    def try_accept(self, token_id: int) -> bool:
        """Go on with a token; False if a mask in force does not allow it; raises as `mask`."""

    def place(self) -> Place:
        """Return where it is."""

    def leave(self) -> None:
        """Release all waiters: its row cannot continue."""

    def too_slow(self, limit: str) -> InvalidRequest:
        """Return the error about masks that take more than a limit of ours."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an advance was when a step looked."""

    late: bool = False
    """Whether a mask had been in the making for longer than a row waits for one."""
    arrived: bool = False
    """Whether the tokens can be judged."""
    done: bool = False
    """Whether its matcher is the engine thread's again."""
    taken: int = 0
    """So many of the tokens were allowed."""
    over_after: int | None = None
    """With so many of them the output was complete, and nothing could follow."""
    error: Exception | None = None
    """Why the tokens cannot be followed."""
    mask_error: Exception | None = None
    """Why nothing can be drawn behind them."""


NOWHERE = Standing()


@dataclass(slots=True, eq=False)
class Advance:
    """A matcher's way to a row's next mask, over the tokens that come before it; made once."""

    matcher: Follower
    tokens: tuple[int, ...]
    draws: bool = True
    """Whether another token may be drawn behind them; if not, no mask is made there."""
    seen: Standing = NOWHERE
    """What the engine thread judges by; the rest is of who performs it."""
    taken: int = 0
    over_after: int | None = None
    error: Exception | None = None
    mask_error: Exception | None = None
    since_s: float | None = None
    """Since when it is at one token and the mask after it."""
    arrived: bool = False
    done: bool = False
    passed: bool = False
    """Whether steps go on without waiting for it."""
    abandoned: bool = False
    """Set if the result is no longer wanted: it ends with the current call."""

    def perform(self, clock: Callable[[], float]) -> None:
        """Go on with the tokens, as far as they are allowed, and make the mask behind them."""
        try:
            self._follow(clock)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
            self.matcher.leave()  # an error refers to where it was raised, and so to this
            self.error = error
        followed = self.error is None and self.taken == len(self.tokens)
        self.arrived = True
        if not followed or not self.draws or self.over_after is not None or self.abandoned:
            return
        try:
            self.matcher.mask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
            self.matcher.leave()
            self.mask_error = error

    def _follow(self, clock: Callable[[], float]) -> None:
        self.since_s = clock()
        for token_id in self.tokens:
            if self.abandoned or not self.matcher.try_accept(token_id):
                return
            self.taken += 1
            if self.over_after is None and self.matcher.is_over:
                self.over_after = self.taken
            self.since_s = clock()

    def look(self, now_s: float) -> None:
        """See how far it is; `now_s` is on the clock of who performs it."""
        done = self.done  # first of all: once it is, nothing changes any more
        late = self.since_s is not None and now_s - self.since_s > self.matcher.constraint.mask_s
        arrived = self.arrived  # before what is there by then
        self.seen = Standing(
            late, arrived, done, self.taken, self.over_after, self.error, self.mask_error
        )

    def check(self) -> None:
        """Judge what became of the tokens, which were seen to have arrived or to be late.

        Raises:
            Exception: they cannot be followed; whatever it is, it concerns this row alone.
        """
        self._check_in_time(there=self.seen.arrived)
        if self.seen.error is not None:
            raise self.seen.error

    def check_mask(self) -> None:
        """Judge whether anything can be drawn behind the tokens; it was seen to be done or late.

        Raises:
            Exception: the row cannot go on; whatever it is, it concerns this row alone.
        """
        self.check()
        self._check_in_time(there=self.seen.done)
        if self.seen.mask_error is not None:
            raise self.seen.mask_error

    def _check_in_time(self, *, there: bool) -> None:
        if not there:
            raise self.matcher.too_slow(f"{self.matcher.constraint.mask_s:g} s for one of them")


class Masks(Protocol):
    """Who makes masks. Real: `MaskThreads`; the ranks of a model have one that tells, or is told.

    One owner: the engine thread.
    """

    def begin(self, work: Advance) -> None:
        """Take work."""

    def wait(self, works: Sequence[Advance], now_s: float) -> None:
        """Wait for what is quick, and see how far each of them is at `now_s`."""

    def wait_for_any(self, works: Sequence[Advance]) -> None:
        """Wait, not for long, until one of them is done: no other row can step."""
