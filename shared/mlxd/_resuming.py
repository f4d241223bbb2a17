"""A generation that outlives its connection: one stream of messages over as many calls as it takes.

Invariants:
- A further call begins at the token after the last one that came, with the seed that the first
  message gave and the tokens so far; so nothing is missed, and nothing comes twice. `offset`s say
  so, and the reader checks them.
- Only what is lost is called for again: a connection, a server that shuts down, a worker that its
  controller could not replace. Whatever a server says about the request ends the stream.
- Bounded: after `RECONNECT_WINDOW_S` without a token the next loss is the last. Calls that fail are
  apart by a pause that doubles.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import DuplicateRequest, MlxdError, ShuttingDown, WorkerLost
from mlxd_shared.wire.status import RemoteError, from_call

GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]"
Start: TypeAlias = Callable[[inference_pb2.GenerateRequest, float | None], GenerateCall]
"""Begins a call, which may take so many seconds."""


class ResumingCall:
    """Implements Call. One reader; `cancel` may come from any task of its event loop."""

    def __init__(
        self,
        start: Start,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the first call. timeout_s: for all of them together."""
        self._start = start
        self._clock = clock
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._request = request
        self._came: list[int] = []
        self._seed: int | None = None
        self._finished = False
        self._lost_s: float | None = None
        """When the first call of those was lost that have brought no token since."""
        self._pause_s = config.RECONNECT_PAUSE_MIN_S
        self._cancelled = asyncio.Event()
        self._call = start(request, timeout_s)

    async def read(self) -> object:
        """Return the next message, of whichever call, or EOF.

        Raises:
            grpc.aio.AioRpcError: the stream has failed, or has been lost for too long.
            asyncio.CancelledError: it was cancelled.
        """
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                if self._finished:  # all has come, but for the status
                    return grpc.aio.EOF
                await self._wait(self._pause_after(error))
                self._call = self._start(self._rest(), self._left_s())
                continue
            if isinstance(message, inference_pb2.GenerateResponse):
                self._note(message)
            return message

    def cancel(self) -> bool:
        """End the call in progress; start no other."""
        self._cancelled.set()
        return self._call.cancel()

    def _note(self, message: inference_pb2.GenerateResponse) -> None:
        """Remember what a further call has to say; the stream has one beginning only."""
        if self._seed is not None:
            message.ClearField("seed")
            message.ClearField("prompt_tokens")
        elif message.HasField("seed"):
            self._seed = message.seed
        self._came += message.token_ids
        self._finished = message.HasField("finish")
        if message.token_ids:
            self._lost_s = None
            self._pause_s = config.RECONNECT_PAUSE_MIN_S

    def _rest(self) -> inference_pb2.GenerateRequest:
        """Return the request for what has not come yet."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if self._came:
            request.resume_token_ids.extend(self._came)
            request.resume_from = len(request.resume_token_ids)
            if self._seed is not None:
                request.sampling.seed = self._seed
        return request

    def _pause_after(self, error: grpc.aio.AioRpcError) -> float:
        """Return how long to wait before the next call; raise `error` where it is the end."""
        reason = from_call(error)
        now_s = self._clock()
        if not self._survives(reason):
            raise error
        if self._lost_s is None:
            self._lost_s = now_s
        left_s = self._lost_s + config.RECONNECT_WINDOW_S - now_s
        if left_s <= 0:
            raise error
        server_s = reason.retry_after_s if isinstance(reason, ShuttingDown) else 0.0
        pause_s = max(self._pause_s * random.uniform(0.5, 1.0), server_s)  # noqa: S311 - no secret
        self._pause_s = min(2 * self._pause_s, config.RECONNECT_PAUSE_MAX_S)
        deadline_s = self._left_s()
        return min(pause_s, left_s, left_s if deadline_s is None else deadline_s)

    def _survives(self, reason: MlxdError) -> bool:
        """Tell whether the stream may be resumed after this; one of several choices never is."""
        if self._request.n > 1:
            return False
        match reason:
            case RemoteError(code):
                return code is grpc.StatusCode.UNAVAILABLE
            case ShuttingDown():
                return True
            case WorkerLost():
                return not self._request.HasField("migrate") or self._request.migrate
            case DuplicateRequest():  # our own, whose loss the server has not noticed yet
                return self._lost_s is not None
            case _:
                return False

    def _left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(self._deadline_s - self._clock(), 0.0)

    async def _wait(self, pause_s: float) -> None:
        """Pause.

        Raises:
            asyncio.CancelledError: the stream was cancelled meanwhile.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), pause_s)
        # Not by what ended the wait: both may have come by the time that this task's turn comes.
        if self._cancelled.is_set():
            raise asyncio.CancelledError
