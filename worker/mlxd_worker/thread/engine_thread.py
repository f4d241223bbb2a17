"""The only door to MLX: one thread imports it, loads, steps and frees; others send messages.

Invariants:
- Nobody else touches an array. Commands go in through a mailbox, plain values come back through
  futures and sinks.
- Between two steps the whole mailbox is served. New streams are refused when it is full; cancels
  and commands never are, because each belongs to a stream or a caller that was admitted.
- A request for figures waits at most STATUS_WAIT_S, then gets the last ones with their age. They
  are never older than a command that has been answered.
- A fault in the loop, or in any command but a load, ends every stream, then the thread, and is
  reported once: the process must end, because the caches are in an unknown state.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import (
    InternalError,
    LoadAbandoned,
    MlxdError,
    QueueFull,
    ShuttingDown,
)
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.engine.request import Cancel, Failed, Submit
from mlxd_worker.thread.facts import DiskFolder, Figures, Loaded, LoadJob
from mlxd_worker.thread.outbox import Outbox, StreamReader

if TYPE_CHECKING:  # this module runs before MLX may be imported
    from mlxd_worker.thread.host import ModelHost

T = TypeVar("T")
FIGURES_INTERVAL_S = 0.1
"""How often figures are taken while the engine is busy."""

_log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do on the engine thread; it settles its own future."""

    perform: Callable[[ModelHost], None]
    refuse: Callable[[MlxdError], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    """End the thread."""


_Message = Submit | Cancel | _Call | _Stop
MakeHost = Callable[[DeviceKind], "ModelHost"]


def _import_host(device: DeviceKind, *, folder: DiskFolder | None = None) -> ModelHost:
    """Import MLX on the calling thread, which owns it from then on; the BLAS is loaded already."""
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415

    return ModelHost(device=device, folder=folder)


def _reason_of(error: BaseException, *, was_made: bool) -> MlxdError:
    """Return what those are told who wait; say what failed, if anything did.

    was_made: whether there was a host. Why there is none is for whoever waits for one.
    """
    if isinstance(error, ShuttingDown) and not was_made:
        return error
    error_id = uuid.uuid4().hex[:12]
    _log.critical("the engine failed", error_id=error_id, exc_info=error)
    return error if isinstance(error, MlxdError) and not was_made else InternalError(error_id)


class EngineThread:
    """The engine's thread and its mailbox; made, started and used on the event loop."""

    def __init__(
        self,
        *,
        device: DeviceKind,
        loop: asyncio.AbstractEventLoop,
        on_fault: Callable[[], None],
        make_host: MakeHost | None = None,
        folder: DiskFolder | None = None,
        rest_s: float = config.IDLE_REST_S,
    ) -> None:
        """Prepare a thread; `on_fault` is called on the event loop if a fault ends it.

        make_host: makes the thread's host, on the thread; by default a `ModelHost` that keeps
        parts of prompts in `folder`, if given.
        rest_s: after this long without work, what is kept for later streams is released.
        """
        self._device = device
        self._rest_s = rest_s
        self._rest_at_s: float | None = None
        """When it will rest; None while it works; infinite once it has rested."""
        self._make_host = make_host or partial(_import_host, folder=folder)
        self._loop = loop
        self._on_fault = on_fault
        self._mailbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._outbox = Outbox(loop)
        self._abandoned = threading.Event()
        self._gate = threading.Lock()
        self._ended = False
        self._figures = Figures(at_s=time.monotonic())
        self._asking: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        """Start the thread; it imports MLX first of all."""
        self._thread.start()

    async def ready(self) -> None:
        """Wait until the thread has imported MLX and made its host.

        Raises:
            ShuttingDown: it was given up. MlxdError: it could not be made, for that reason.
            InternalError: that failed otherwise.
        """
        await self._call(lambda _: None)

    async def device_name(self) -> str:
        """Return the device's own name."""
        return await self._call(lambda host: host.device_name())

    async def stop(self) -> None:
        """End the thread after the current step or load step, and wait for it; idempotent."""
        self.abandon_load()
        self._post(_Stop())
        await asyncio.to_thread(self._thread.join)

    def reader(self) -> StreamReader:
        """Return a fresh sink and reader for one stream."""
        return StreamReader(self._outbox)

    def submit(self, request: Submit) -> None:
        """Send a stream to the engine; its sink gets everything else.

        Raises:
            QueueFull: the mailbox is full.
            ShuttingDown: the thread has ended.
        """
        if self._mailbox.qsize() >= config.ENGINE_MAILBOX_MAX:
            raise QueueFull("engine messages", config.ENGINE_MAILBOX_MAX)
        if not self._post(request):
            raise ShuttingDown

    def cancel(self, request: Cancel) -> None:
        """Have the engine forget a stream; returns at once; idempotent."""
        self._post(request)

    def load(self, job: LoadJob, report: Callable[[LoadProgress], None]) -> Awaitable[Loaded]:
        """Load a model when awaited; `report` is called on the event loop.

        The load may be abandoned from now on, even before it is awaited.

        Raises:
            InvalidModel, InvalidRequest: as `ModelHost.load`.
            LoadAbandoned: `abandon_load` was called meanwhile.
        """
        abandoned = self._abandoned = threading.Event()

        def cross(progress: LoadProgress) -> None:
            if abandoned.is_set():
                raise LoadAbandoned(job.name)
            self._loop.call_soon_threadsafe(report, progress)

        return self._call(lambda host: host.load(job, cross), recoverable=True)

    def abandon_load(self) -> None:
        """Make a load in progress give up at its next step."""
        self._abandoned.set()

    async def unload(self, error: MlxdError) -> int:
        """End all streams with `error`, unload the model; return MLX's active bytes afterwards."""
        return await self._call(lambda host: host.unload(error))

    async def shrink(self, target_nbytes: int) -> tuple[int, int]:
        """Release memory down to a target; return the bytes held before and after."""
        return await self._call(lambda host: host.shrink(target_nbytes))

    async def share_disk(self, nbytes: int) -> None:
        """Have what the model keeps on disk take at most so much; return once it does."""
        applied = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has ended, and so has whoever waits
                self._loop.call_soon_threadsafe(applied.set)

        await self._call(lambda host: host.share_disk(nbytes, tell))
        await applied.wait()

    async def end_streams(self, error: MlxdError) -> None:
        """End every stream with `error` and free its row."""
        await self._call(lambda host: host.end_streams(error))

    async def figures(self) -> Figures:
        """Return the newest figures available within STATUS_WAIT_S."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._refresh())
        await asyncio.wait([self._asking], timeout=config.STATUS_WAIT_S)
        return self._figures

    async def _refresh(self) -> None:
        with suppress(ShuttingDown, InternalError):  # the last figures remain
            await self._call(lambda _: None)

    async def _call(self, act: Callable[[ModelHost], T], *, recoverable: bool = False) -> T:
        """Run `act` on the engine thread between two steps; it runs even without a waiter.

        An exception reaches the caller. Unless `recoverable`, it also ends the thread: caches and
        snapshots may be half changed.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def perform(host: ModelHost) -> None:
            try:
                result = act(host)
                self._figures = host.figures()
            except Exception as error:
                future.set_exception(error)
                if not recoverable:
                    raise
            else:
                future.set_result(result)

        if not self._post(_Call(perform, future.set_exception)):
            raise ShuttingDown
        return await asyncio.wrap_future(future, loop=self._loop)

    def _post(self, message: _Message) -> bool:
        """Put a message into the mailbox; False if it will not be read."""
        with self._gate:
            if not self._ended:
                self._mailbox.put(message)
            return not self._ended

    def _run(self) -> None:
        """The thread: serve the mailbox, step while there is work, report a fault."""
        host: ModelHost | None = None
        try:
            host = self._make_host(self._device)
            self._serve(host)
        except BaseException as error:  # noqa: BLE001 - reported once
            reason = _reason_of(error, was_made=host is not None)
            try:
                self._end(host, reason)
                if host is not None:
                    host.leave()
            finally:
                self._loop.call_soon_threadsafe(self._on_fault)
        else:
            self._end(host, ShuttingDown())
            host.close()
            host.leave()

    def _serve(self, host: ModelHost) -> None:
        while True:
            message = self._next(host)
            match message:
                case None:
                    host.step()
                    if time.monotonic() - self._figures.at_s > FIGURES_INTERVAL_S:
                        self._figures = host.figures()
                case Submit():
                    host.submit(message)
                case Cancel():
                    host.cancel(message)
                case _Call():
                    message.perform(host)
                case _Stop():
                    return
            self._outbox.flush(hold=host.busy)

    def _next(self, host: ModelHost) -> _Message | None:
        """Return the next message; None if there is none and the engine has work to do."""
        with suppress(queue.Empty):
            return self._mailbox.get_nowait()
        if host.busy:
            self._rest_at_s = None
            return None
        self._figures = host.settle()
        now_s = time.monotonic()
        if self._rest_at_s is None:
            self._rest_at_s = now_s + self._rest_s  # a request for figures does not postpone it
        if self._rest_at_s < math.inf:
            with suppress(queue.Empty):
                return self._mailbox.get(timeout=max(self._rest_at_s - now_s, 0.0))
            host.rest()
            self._rest_at_s = math.inf
            self._figures = host.settle()
        return self._mailbox.get()

    def _end(self, host: ModelHost | None, error: MlxdError) -> None:
        """Fail all remaining waiters; admit none from now on."""
        with self._gate:
            self._ended = True
        if host is not None:
            host.fail_all(error)
        with suppress(queue.Empty):
            while True:
                match self._mailbox.get_nowait():
                    case Submit() as request:
                        request.sink.put(Failed(error))
                    case _Call() as call:
                        call.refuse(error)
                    case Cancel() | _Stop():
                        pass
        self._outbox.flush()
