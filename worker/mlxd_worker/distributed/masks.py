"""Masks of several ranks: the first one makes them, and tells each step how far it is with them.

Invariants:
- All ranks see the same of each row's `Advance`, in the same step: what a follower knows of a
  constraint it has from the leader, and it waits for nothing but that.
- A mask goes over the wire once, as it is (an eighth of a byte a token): one that is as the row's
  last one was, such as within a string, does not go again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from enum import IntFlag
from typing import Final
from weakref import WeakKeyDictionary

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.distributed.frames import WireBroken
from mlxd_worker.engine.masks.advance import Advance, Follower, Place, Standing, Watched
from mlxd_worker.engine.masks.calls import CallMatcher
from mlxd_worker.engine.masks.remote import RemoteMatcher
from mlxd_worker.engine.masks.threads import MaskThreads

_HEAD: Final = struct.Struct(">HII")
"""Flags, how many tokens were taken, and with how many the output was over, plus one, or 0."""
_LENGTH: Final = struct.Struct(">I")
_FAILURE: Final = "see the first rank"
"""The words that no client reads."""


class _Flag(IntFlag):
    LATE = 1
    ARRIVED = 2
    DONE = 4
    FAILED = 8
    UNDRAWABLE = 16
    PLACED = 32
    """Its place follows."""
    AWAKE = 64
    SAME = 128
    """Its mask is the one that was told of the row last."""
    AT_START = 256
    REASONING = 512
    WATCHED = 1024
    """What it has noticed of the text follows."""


LastMasks = MutableMapping[Follower, bytes]
"""The mask that was told of each row last, while it is in force or followed by others."""


class SentMasks:
    """Threads of the first rank's, and what its steps see of their work, for all others."""

    def __init__(self, threads: int, send: Callable[[bytes], None]) -> None:
        """Make so many masks at once; `send` takes what the other ranks have to read."""
        self._threads = MaskThreads(threads, clock=time.monotonic)
        self._send = send
        self._last: LastMasks = WeakKeyDictionary()

    def begin(self, work: Advance) -> None:
        """Queue work."""
        self._threads.begin(work)

    def wait(self, works: Sequence[Advance], now_s: float) -> None:
        """Wait for what is quick; see how far each of them is, and tell."""
        self._threads.wait(works, now_s)
        for work in works:
            _complete(work)
        self._send(pack_masks(works, self._last))

    def wait_for_any(self, works: Sequence[Advance]) -> None:
        """Wait, not for long, until one of them is done; the others wait for the next step."""
        self._threads.wait_for_any(works)


class HeardMasks:
    """What a follower has of the masks that the first rank makes."""

    def __init__(self, receive: Callable[[], bytes]) -> None:
        """`receive` returns what the first rank has sent at this place."""
        self._receive = receive

    def begin(self, work: Advance) -> None:
        """Leave the work to the first rank."""

    def wait(self, works: Sequence[Advance], now_s: float) -> None:
        """Wait for the first rank, and see what it saw.

        Raises:
            WireBroken: it says something of other rows than these.
        """
        del now_s  # who is late there is late here
        read_masks(self._receive(), works)

    def wait_for_any(self, works: Sequence[Advance]) -> None:
        """Wait for nothing: the next step comes when the first rank has waited."""


def _complete(work: Advance) -> None:
    """Make the mask of an output that is over: a stream that may not end yet is drawn from it.

    Alone its row would make it, and only then.
    """
    seen = work.seen
    if not seen.done or seen.over_after is None or not work.draws:
        return
    try:
        work.matcher.mask()
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
        work.seen = replace(seen, mask_error=error)


def pack_masks(works: Sequence[Advance], last: LastMasks) -> bytes:
    """Return what was seen of `works`, and where those matchers are that go on, as a body.

    last: is kept up to date.
    """
    return b"".join([_pack(work, last) for work in works])


def _pack(work: Advance, last: LastMasks) -> bytes:
    seen, matcher = work.seen, work.matcher
    flags = _Flag.LATE * seen.late | _Flag.ARRIVED * seen.arrived | _Flag.DONE * seen.done
    flags |= _Flag.FAILED * (seen.error is not None)
    flags |= _Flag.UNDRAWABLE * (seen.mask_error is not None)
    parts: list[bytes] = []
    if seen.done and seen.error is None and seen.mask_error is None:
        place = matcher.place()
        same = place.awake and last.get(matcher) == place.mask
        flags |= _Flag.PLACED | _Flag.AWAKE * place.awake | _Flag.SAME * same
        if place.watched is not None:
            watched = place.watched
            flags |= _Flag.WATCHED | _Flag.AT_START * watched.at_start
            flags |= _Flag.REASONING * watched.reasoning
            parts += _LENGTH.pack(len(watched.tail)), watched.tail
        if not place.awake:
            last.pop(matcher, None)  # it begins anew when it wakes
        elif not same:
            parts += _LENGTH.pack(len(place.mask)), place.mask
            last[matcher] = place.mask
    over = 0 if seen.over_after is None else seen.over_after + 1
    return _HEAD.pack(flags, seen.taken, over) + b"".join(parts)


def read_masks(body: bytes, works: Sequence[Advance]) -> None:
    """Have each of `works` be seen as the first rank saw its own, and its matcher be there.

    Raises:
        WireBroken: the body is not of so many.
    """
    reader = _Reader(body)
    for work in works:
        _read(reader, work)
    reader.end()


def _read(reader: _Reader, work: Advance) -> None:
    bits, taken, over = _HEAD.unpack(reader.take(_HEAD.size))
    flags, matcher = _Flag(bits), work.matcher
    error = InvalidRequest.of(matcher.constraint.field, _FAILURE)
    work.seen = Standing(
        late=_Flag.LATE in flags,
        arrived=_Flag.ARRIVED in flags,
        done=_Flag.DONE in flags,
        taken=taken,
        over_after=over - 1 if over else None,
        error=error if _Flag.FAILED in flags else None,
        mask_error=error if _Flag.UNDRAWABLE in flags else None,
    )
    if _Flag.PLACED not in flags:
        return
    watched = None
    if _Flag.WATCHED in flags:
        tail = reader.text()
        watched = Watched(_Flag.AT_START in flags, _Flag.REASONING in flags, tail)
    awake, mask = _Flag.AWAKE in flags, b""
    if awake:
        mask = matcher.place().mask if _Flag.SAME in flags else reader.text()
    assert isinstance(matcher, RemoteMatcher | CallMatcher), "a follower's"
    matcher.move_to(Place(mask, awake, watched))


class _Reader:
    """A body, from its beginning to its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int) -> bytes:
        part = self._body[self._at : self._at + count]
        self._at += count
        if len(part) < count:
            raise WireBroken(f"MASKS: {len(self._body)} bytes are too few")
        return part

    def text(self) -> bytes:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return self.take(length)

    def end(self) -> None:
        if self._at < len(self._body):
            raise WireBroken(f"MASKS: {len(self._body)} bytes, {self._at} of them of its rows")
