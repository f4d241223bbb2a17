"""Tasks of calls that are cancelled between gRPC's batches, never within one.

grpc.aio cancels a call's task as soon as its client resets the call. Where that task waits for a
batch of the core's (`execute_batch`), the batch's operations are never freed: grpcio 1.85 loses
80 bytes an operation and what was received, which a peer that resets calls at once turns into as
much memory as it likes. Here such a cancellation waits for the batch, which the core ends at once
when the call is dead.

Invariants:
- A task that waits for anything else, a handler of ours above all, is cancelled at once.
- A cancellation that waits is made up for as soon as the batch is done; it is never lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

CALL, BATCH = "_handle_exceptions", "execute_batch"
"""The coroutines of grpc.aio that are a call, and that wait for one of its batches."""
_T = TypeVar("_T")


def spare_batches(loop: asyncio.AbstractEventLoop) -> None:
    """Have this loop's calls be CallTasks from now on; a loop's own factory is left as it is."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


class CallTask(asyncio.Task[_T]):
    """The task of one call."""

    _is_late = False
    """Whether a cancellation waits for a batch."""

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ANN401 - as in asyncio
        """Cancel the task, once it waits for no batch."""
        if self.done() or not _awaits_batch(self.get_coro()):
            return super().cancel(msg)
        if not self._is_late:
            self._is_late = True
            batch: asyncio.Future[Any] | None = getattr(self, "_fut_waiter", None)
            if batch is None or batch.done():  # its step is due, before what is called from now on
                self.get_loop().call_soon(self._cancel_again, msg)
            else:
                batch.add_done_callback(lambda _: self._cancel_again(msg))
        return True

    def _cancel_again(self, msg: Any | None) -> None:  # noqa: ANN401 - as in asyncio
        self._is_late = False
        self.cancel(msg)


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T],
    **options: Any,  # noqa: ANN401 - whatever this Python's tasks take
) -> asyncio.Task[_T]:
    kind = CallTask if getattr(coro, "__name__", "") == CALL else asyncio.Task
    return kind(coro, loop=loop, **options)


def _awaits_batch(coro: object) -> bool:
    """Tell whether the innermost coroutine that this one waits for is one of gRPC's batches."""
    name = ""
    while (inner := getattr(coro, "cr_await", None)) is not None:
        name = getattr(coro, "__name__", "")
        coro = inner
    return name == BATCH
