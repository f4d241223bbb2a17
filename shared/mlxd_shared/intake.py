"""What a server takes in: requests are counted and accounted for before anything is made of them.

Invariants:
- A request is parsed only after `wire_scan` has passed it, and while REQUESTS_HELD_BYTES_MAX has
  room for all that is made of it; the room is given back when its call ends.
- What is large is read and checked on a thread, in steps that each keep the event loop waiting for
  no longer than one pass over some megabytes. At most REQUEST_THREADS_MAX are read at once.
- Whoever leaves takes its work along: what has not begun never does, what has begun is bounded, and
  its room is given back only once it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from google.protobuf.message import DecodeError, Message

from mlxd_shared import config
from mlxd_shared.errors import InvalidRequest, QueueFull
from mlxd_shared.wire_scan import FROM_CLIENTS, Limits, Size, plan_of, scan

_P = ParamSpec("_P")
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
_executor: ContextVar[Executor | None] = ContextVar("executor", default=None)
"""Where the call of this task does what takes long; None: at once, its request is small."""


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
    """The requests of one server. One owner: its event loop."""

    def __init__(
        self,
        limits: Limits = FROM_CLIENTS,
        *,
        held_nbytes_max: int = config.REQUESTS_HELD_BYTES_MAX,
    ) -> None:
        """Hold nothing; no thread is started before it is needed."""
        self.limits = limits
        self.held_nbytes = 0
        self._held_nbytes_max = held_nbytes_max
        self._threads = ThreadPoolExecutor(config.REQUEST_THREADS_MAX, "requests")

    @asynccontextmanager
    async def taken(self, raw: bytes, reader: Reader[_M]) -> AsyncIterator[_M]:
        """Hold a request while its call goes on; `paced` knows how large it is meanwhile.

        Raises:
            InvalidRequest: it holds more than it may, or is no message of the type.
            QueueFull: the requests under way leave no room for it.
        """
        large = len(raw) > config.INLINE_REQUEST_BYTES_MAX
        _executor.set(self._threads if large else None)
        held = Size(len(raw)).held_nbytes
        self._hold(held)
        try:
            size = await paced(reader.size, raw)
            self._hold(size.held_nbytes - held)
            held = size.held_nbytes
            yield await paced(reader.message, raw)
        finally:
            self.held_nbytes -= held

    def _hold(self, nbytes: int) -> None:
        if self.held_nbytes + nbytes > self._held_nbytes_max:
            raise QueueFull(
                "bytes of requests under way", self._held_nbytes_max, config.REQUESTS_HELD_RETRY_S
            )
        self.held_nbytes += nbytes


async def paced(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what `function` makes of this call's request, on a thread if the request is large."""
    executor = _executor.get()
    if executor is None:
        return function(*args, **kwargs)
    work = executor.submit(partial(function, *args, **kwargs))
    outcome = asyncio.wrap_future(work)
    try:
        await asyncio.wait({outcome})
    except asyncio.CancelledError:
        if not work.cancel():
            outcome.add_done_callback(_ignore)
            await asyncio.wait({outcome})
        raise
    return outcome.result()


def _ignore(outcome: asyncio.Future[Any]) -> None:
    """Take note of what came of work that nobody is left to hear of."""
    if not outcome.cancelled():
        outcome.exception()
