"""When a block is worth writing, and how much of a prompt is worth reading. Pure.

Invariants:
- Everything follows from two measured rates: bytes a second that come from this disk, and seconds
  that this machine takes to compute a token. Nothing is fitted to a model or a machine.
- Nothing is read where computing is expected to be as quick, and nothing is written that would not
  be read. Where nothing was computed yet, what is on the disk is trusted: it was written because it
  pays on this machine.
- A faster disk, or a slower machine, never makes less of a prompt worth reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READ_ASSUMED_NBYTES_S = 500e6
"""What a disk is taken to give before anything was read or written: less than most do."""

OPEN_S = 1e-3
"""What each file costs beside its bytes: to open, check and hand over."""

USES_MIN = 2
"""Uses after which a block is written: many prompts come once (decision 0015: 24 % of blocks)."""

LATE_FACTOR = 1.0
"""A read is given up after as many times what computing the same would have taken."""

SLOW_FACTOR = 4.0
"""Or, where nothing was computed yet, after as many times what reading should have taken."""

PAUSE_S = 1.0
"""What any disk may take on top of that: some have to start turning."""

REMEMBERED = 0.8
"""Of what was measured before, with each new measurement."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured on this machine."""

    read_nbytes_s: float = READ_ASSUMED_NBYTES_S
    token_s: float = 0.0
    """What computing one token of a prompt takes; 0 where none was."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A length to which blocks on the disk bring a prompt, and what they take."""

    tokens: int
    nbytes: int
    files: int


def read_s(rates: Rates, nbytes: int, *, files: int = 1) -> float:
    """Return how long reading is expected to take, in seconds."""
    return files * OPEN_S + nbytes / rates.read_nbytes_s


def is_worth_writing(
    rates: Rates, *, tokens: int, nbytes: int, files: int = 1, uses: int, leaving: bool = False
) -> bool:
    """Tell whether files should be written, `nbytes` in all, that save computing `tokens`.

    uses: of them, the one that made them included. leaving: their model is about to go, so that
    the next use can only be from disk.
    """
    if uses < USES_MIN and not leaving:
        return False
    return read_s(rates, nbytes, files=files) < tokens * rates.token_s


def choose_offer(rates: Rates, start: int, offers: Sequence[Offer]) -> Offer | None:
    """Return the offer that saves most time to a prompt that stands at `start` tokens, if any does.

    Of equals the shortest. Where nothing was computed yet, the longest.
    """
    useful = [offer for offer in offers if offer.tokens > start]
    if not useful:
        return None
    if not rates.token_s:
        return max(useful, key=lambda offer: offer.tokens)
    best = max(useful, key=lambda offer: (_saved_s(rates, start, offer), -offer.tokens))
    return best if _saved_s(rates, start, best) > 0 else None


def patience_s(rates: Rates, offer: Offer, *, start: int) -> float:
    """Return how long a prompt that stands at `start` waits for an offer.

    As long as computing the same would have taken; where nothing was computed yet, a few times as
    long as reading should take, so that a disk that hangs holds nobody up for ever.
    """
    if rates.token_s:
        return LATE_FACTOR * (offer.tokens - start) * rates.token_s
    return SLOW_FACTOR * (PAUSE_S + read_s(rates, offer.nbytes, files=offer.files))


def _saved_s(rates: Rates, start: int, offer: Offer) -> float:
    computing_s = (offer.tokens - start) * rates.token_s
    return computing_s - read_s(rates, offer.nbytes, files=offer.files)


class Meter:
    """Bytes a second, of what was measured lately. One owner."""

    def __init__(self) -> None:
        self._nbytes = 0.0
        self._seconds = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Count one measurement; one that took no time tells nothing."""
        if seconds > 0 and nbytes > 0:
            self._nbytes = REMEMBERED * self._nbytes + nbytes
            self._seconds = REMEMBERED * self._seconds + seconds

    @property
    def nbytes_s(self) -> float | None:
        """The rate; None where nothing was measured."""
        return self._nbytes / self._seconds if self._seconds else None
