"""What a server takes in: requests are counted and accounted for before anything is made of them.

Invariants:
- A request is parsed only after `wire_scan` has passed it, here or at the door of the controller
  that sends it (`proof`), and while REQUESTS_HELD_BYTES_MAX has room for all that is made of it;
  the room is given back when its call ends.
- What is large is read and checked on a thread, in steps that each keep the event loop waiting for
  no longer than one pass over some megabytes. At most REQUEST_THREADS_MAX are read at once.
- Once large requests have gone, the heap returns its free memory to the system.
- Whoever leaves takes its work along: what has not begun never does, what has begun is bounded, and
  its room is given back only once it is over, however often its call is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from google.protobuf.message import DecodeError, Message

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from mlxd_shared.ops.heap import trim_heap
from mlxd_shared.wire.proof import Checked, with_relay_room
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, Limits, Size, plan_of, scan

_P = ParamSpec("_P")
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


@dataclass(slots=True)
class _Original:
    """A request as it came; empty until it is parsed.

    And once its call has ended: tasks that outlive it may know of it.
    """

    raw: bytes = b""
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """What is known of the request of a task's call."""

    executor: Executor | None = None
    """Where it does what takes long; None: at once, its request is small."""
    size: Size | None = None
    vouched: bool = False
    """Whether a controller has counted and checked it."""
    original: _Original | None = None
    """The request as it came; None outside a call."""


_NO_CALL = _Call()
_call: ContextVar[_Call] = ContextVar("call", default=_NO_CALL)


class Reader(Generic[_M]):
    """Makes messages of one type from bytes that are within the limits."""

    def __init__(self, kind: type[_M], limits: Limits) -> None:
        """Read the type."""
        self._kind = kind
        self._limits = limits
        self._plan = plan_of(kind.DESCRIPTOR)

    def size(self, raw: bytes) -> Size:
        """Return what a request holds.

        Raises:
            InvalidRequest: more than it may, or it is no message of the type.
        """
        try:
            return scan(raw, self._plan, self._limits)
        except DecodeError as error:
            raise _unreadable() from error

    def message(self, raw: bytes) -> _M:
        """Return the message, of a size that was looked at.

        Raises:
            InvalidRequest: it is no message of the type.
        """
        try:
            return self._kind.FromString(raw)
        except DecodeError as error:
            raise _unreadable() from error

    def whole(self, raw: bytes) -> _M:
        """Return one message of a stream of requests, which is read at once.

        Raises:
            InvalidRequest: it is not small, or no message of the type.
        """
        if len(raw) > config.SMALL_REQUEST_BYTES_MAX:
            limit = f"has {len(raw)} bytes; at most {config.SMALL_REQUEST_BYTES_MAX} in a stream"
            raise InvalidRequest.of("request", limit)
        self.size(raw)
        return self.message(raw)


def _unreadable() -> InvalidRequest:
    return InvalidRequest.of("request", "is not a message of this method's type")


class Intake:
    """The requests of one server, or of one kind. One owner: the server's event loop."""

    def __init__(
        self,
        limits: Limits = FROM_CLIENTS,
        *,
        held_nbytes_max: int = config.REQUESTS_HELD_BYTES_MAX,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        """Hold nothing; no thread is started before it is needed.

        trim: gives free memory of the process back to the system, on a thread.
        """
        self.limits = limits
        self.held_nbytes = 0
        self._trim = trim
        self._trims_next = False
        """Whether much was held since the heap was trimmed."""
        self._trimming: asyncio.TimerHandle | None = None
        self._held_nbytes_max = held_nbytes_max
        self._threads = ThreadPoolExecutor(config.REQUEST_THREADS_MAX, "requests")

    @asynccontextmanager
    async def take(
        self, raw: bytes, reader: Reader[_M], *, counted: Size | None = None
    ) -> AsyncIterator[_M]:
        """Hold a request while its call goes on; `run_paced` knows how large it is meanwhile.

        counted: what this worker's controller counted in it; it has passed the checks there.

        Raises:
            InvalidRequest: it holds more than it may, or is no message of the type.
            QueueFull: the requests under way leave no room for it.
        """
        large = len(raw) > config.INLINE_REQUEST_BYTES_MAX
        original = _Original()
        executor = self._threads if large else None
        call = _Call(executor, vouched=counted is not None, original=original)
        _call.set(call)
        held = Size(len(raw)).held_nbytes
        self._hold(held)
        try:
            if counted is None:
                size = await run_paced(reader.size, raw)
            else:
                size = replace(counted, nbytes=len(raw))
            _call.set(replace(call, size=size))
            self._hold(size.held_nbytes - held)
            held = size.held_nbytes
            message = await run_paced(reader.message, raw)
            original.raw, original.message = raw, message
            yield message
        finally:
            original.raw, original.message = b"", None
            self.held_nbytes -= held
            self._tidy_up()

    def _hold(self, nbytes: int) -> None:
        if self.held_nbytes + nbytes > self._held_nbytes_max:
            raise QueueFull(
                "bytes of requests under way", self._held_nbytes_max, config.REQUESTS_HELD_RETRY_S
            )
        self.held_nbytes += nbytes
        self._trims_next |= not self._holds_little

    @property
    def _holds_little(self) -> bool:
        return self.held_nbytes <= config.REQUESTS_HELD_TRIM_BYTES

    def _tidy_up(self) -> None:
        """Have the heap trimmed if little is held, a moment after much was.

        Only then has gRPC dropped the last bytes, and another request would need them again.
        """
        if self._trims_next and self._holds_little and self._trimming is None:
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(config.REQUESTS_HELD_TRIM_S, self._trim_if_idle)

    def _trim_if_idle(self) -> None:
        self._trimming = None
        if self._holds_little:
            self._trims_next = False
            self._threads.submit(self._trim)


def is_checked() -> bool:
    """Return whether this call's request has passed the checks at its controller's door."""
    return _call.get().vouched


def sent_nbytes(request: Message) -> int:
    """Return how many bytes `as_checked` has of this request, without changes: as a client sent it.

    Those may be many more than what was parsed: of a field that is there twice one is left.
    """
    raw = _as_it_came(request)
    return request.ByteSize() if raw is None else len(raw)


def as_checked(request: Message, changes: Message | None = None, *, ids: int = 0) -> Checked:
    """Return this call's request for a worker; its fields have been checked here.

    request: as it came, and then what was parsed is passed on; or one that was made of what came.
    changes: fields that are set behind its own (`Checked`).
    ids: how many token ids it has more than it came with.
    """
    raw = _as_it_came(request)
    if raw is None:
        raw = request.SerializeToString()
    behind = b"" if changes is None else changes.SerializeToString()
    return Checked(raw, behind, with_relay_room(_call.get().size, ids=ids))


def _as_it_came(request: Message) -> bytes | None:
    """Return the bytes that were parsed into this request; None: it was made of others."""
    original = _call.get().original
    return None if original is None or original.message is not request else original.raw


async def run_paced(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what `function` makes of this call's request, on a thread if the request is large."""
    executor = _call.get().executor
    if executor is None:
        return function(*args, **kwargs)
    work = executor.submit(partial(function, *args, **kwargs))
    outcome = asyncio.wrap_future(work)
    try:
        await asyncio.wait({outcome})
    except asyncio.CancelledError:
        if not work.cancel():
            outcome.add_done_callback(_ignore)
            await _over(outcome)
        raise
    try:
        return outcome.result()
    finally:
        # An error knows this frame, and both know the error: without this the request would stay
        # in memory until the next collection of cycles.
        del outcome, work


async def _over(outcome: asyncio.Future[Any]) -> None:
    """Wait for work that has begun, for a call that was cancelled and may be once more."""
    while not outcome.done():
        with suppress(asyncio.CancelledError):  # the first is raised again once it is over
            await asyncio.wait({outcome})


def _ignore(outcome: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of work that nobody waits for."""
    if not outcome.cancelled():
        outcome.exception()
