"""How many calls a server handles at once; calls beyond that are told when to retry.

Invariants:
- A call counts from when the server takes it, before anything of its request is read, until its
  task has ended, however it ends. So one that never sends its request counts as well.
- A refused call reaches no handler and no other interceptor, and nothing of its request is read.
- Health and status have room of their own: they answer while all else is refused.
- Those refused are told times that are spread evenly over a span that grows with their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import grpc

from mlxd_shared import config
from mlxd_shared.domain.errors import QueueFull
from mlxd_shared.domain.retry_times import retry_after_s
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.interceptors import Continuation, Handler, abort, is_inquiry, refuse_unread

_log = get_logger("admission")


class Room:
    """The places of one kind of call. Event loop only."""

    def __init__(self, name: str, places: int) -> None:
        """Begin empty; `name` is what a refusal calls the queue that is full."""
        self.taken = 0
        self._name = name
        self._places = places
        self._refused = 0

    def enter(self) -> None:
        """Take a place; `leave` gives it back.

        Raises:
            QueueFull: all are taken.
        """
        if self.taken < self._places:
            self.taken += 1
            return
        if not self._refused:
            _log.warning("refusing calls", queue=self._name, limit=self._places)
        self._refused += 1
        raise QueueFull(self._name, self._places, retry_after_s(self._refused))

    def leave(self) -> None:
        """Give a place back; with half of them free the crowd is over."""
        self.taken -= 1
        if self._refused and self.taken <= self._places // 2:
            _log.info("taking calls again", queue=self._name, refused=self._refused)
            self._refused = 0


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls beyond the server's places. To stand before whatever costs something."""

    def __init__(self, calls_max: int, *, asks: Callable[[str], bool] = is_inquiry) -> None:
        """Let `calls_max` calls in at once, beside those that ask how the server is.

        asks: whether a method does only that, or something else that must not wait for the others.
        """
        self._calls = Room("calls", calls_max)
        self._asks = asks
        self._inquiries = Room("health and status calls", config.INQUIRIES_MAX)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Take a place for as long as the call's task lasts, or refuse without asking on."""
        asks = self._asks(handler_call_details.method)
        room = self._inquiries if asks else self._calls
        try:
            room.enter()
        except QueueFull as full:
            return refuse_unread(partial(abort, error=full))
        # gRPC asks its interceptors in the task that then runs the handler.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: room.leave())
        return await continuation(handler_call_details)
