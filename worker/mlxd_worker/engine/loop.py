"""The step loop of one loaded model: admit, one prompt chunk, one decode step for all, emit.

Invariants:
- Synchronous and on one thread; it never waits for a client, a clock or a lock.
- At most `rows_max` rows hold caches; at most `waiting_max` more streams wait, in order of arrival.
- A stream that is known here gets exactly one end, unless it is cancelled.
- A fault that concerns one row fails that row alone; any other exception leaves `step`, and the
  owner must `fail_all` and end: the caches are then in an unknown state.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from mlxd_shared import config
from mlxd_shared.errors import InternalError, MlxdError, QueueFull
from mlxd_shared.logs import get_logger
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.forward import decode, in_batch_order, prefill
from mlxd_worker.engine.request import Event, Failed, StreamId, Submit, Tokens
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.text import TextDecoder, TextStream
from mlxd_worker.models.base import Model

MakeDecoder = Callable[[bool], TextDecoder]
"""Takes whether special tokens are left out; returns a fresh decoder for one stream."""

_log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's bounds for one model."""

    context_length: int
    rows_max: int
    waiting_max: int = config.WAITING_STREAMS_MAX
    prefill_chunk_tokens: int = config.PREFILL_CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How busy the engine is."""

    running: int = 0
    waiting: int = 0
    oldest_wait_s: float = 0.0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0


class Engine:
    """Serves the streams of one model. One owner: the engine thread."""

    def __init__(
        self,
        model: Model,
        caches: RowCaches,
        make_decoder: MakeDecoder,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the model's caches over; they must hold no rows."""
        self.limits = limits
        self._model = model
        self._caches = caches
        self._make_decoder = make_decoder
        self._clock = clock
        self._waiting: dict[StreamId, Submit] = {}
        self._rows: dict[StreamId, Row] = {}
        self._next_row = 0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._rows or self._waiting)

    @property
    def streams(self) -> int:
        """How many streams are running or waiting."""
        return len(self._rows) + len(self._waiting)

    def occupancy(self) -> Occupancy:
        """Return how busy the engine is now."""
        oldest_s = next((s.submitted_s for s in self._waiting.values()), None)
        return Occupancy(
            running=len(self._rows),
            waiting=len(self._waiting),
            oldest_wait_s=0.0 if oldest_s is None else max(self._clock() - oldest_s, 0.0),
            kv_tokens_used=sum(row.offset for row in self._rows.values()),
            kv_tokens_capacity=self.limits.rows_max * self.limits.context_length,
        )

    def submit(self, request: Submit) -> None:
        """Take a stream; where the queue is full, its sink gets QueueFull."""
        assert 0 < len(request.prompt) < self.limits.context_length, "checked by the submitter"
        if self.streams >= self.limits.rows_max + self.limits.waiting_max:
            request.sink.put(Failed(QueueFull("waiting streams", self.limits.waiting_max)))
            return
        self._waiting[request.stream] = request

    def cancel(self, stream: StreamId) -> None:
        """Forget a stream and free its row; one that is not known is ignored."""
        if self._waiting.pop(stream, None) is None and stream in self._rows:
            self._release(stream)

    def fail_all(self, error: MlxdError) -> None:
        """End every stream with `error`, touching no cache."""
        ended = [*(row.request for row in self._rows.values()), *self._waiting.values()]
        self._rows.clear()
        self._waiting.clear()
        for request in ended:
            request.sink.put(Failed(error))

    def release_all(self, error: MlxdError) -> None:
        """End every stream with `error` and free its row."""
        for row in self._rows.values():
            self._caches.leave(row.id)
        self.fail_all(error)

    def step(self) -> None:
        """Do one round; returns after at most one chunk and one decode step."""
        self._admit()
        self._prefill_oldest()
        self._decode_all()

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self.limits.rows_max:
            stream, request = next(iter(self._waiting.items()))
            del self._waiting[stream]
            try:
                text = TextStream(self._make_decoder(request.skip_special_tokens), request.stop)
            except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
                request.sink.put(_failure(request, error))
                continue
            row = Row(RowId(self._next_row), request, text, self.limits.context_length)
            self._next_row += 1
            self._rows[stream] = row
            self._caches.join(row.id, tokens=len(request.prompt))

    def _prefill_oldest(self) -> None:
        row = next((row for row in self._rows.values() if not row.decoding), None)
        if row is None:
            return
        row.start_prefill(self._clock())
        chunk = row.next_chunk(self.limits.prefill_chunk_tokens)
        prefill(self._model, self._caches, row, chunk)

    def _decode_all(self) -> None:
        rows = [row for row in self._rows.values() if row.decoding]
        if not rows:
            return
        started_s = self._clock()
        for row in rows:
            row.start_prefill(started_s)
        rows = in_batch_order(self._caches, rows)
        drawn = decode(self._model, self._caches, rows)
        now_s = self._clock()
        for row, token_id in zip(rows, drawn, strict=True):
            self._emit(row, token_id, now_s)

    def _emit(self, row: Row, token_id: int, now_s: float) -> None:
        event: Event
        try:
            event = row.take(token_id, now_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
            event = _failure(row.request, error)
        row.request.sink.put(event)
        if not isinstance(event, Tokens):
            self._release(row.request.stream)

    def _release(self, stream: StreamId) -> None:
        self._caches.leave(self._rows.pop(stream).id)


def _failure(request: Submit, error: Exception) -> Failed:
    """Log what is wrong with one stream and return what its client is told."""
    error_id = uuid.uuid4().hex[:12]
    _log.error("a row failed", stream=request.stream, error_id=error_id, exc_info=error)
    return Failed(InternalError(error_id))
