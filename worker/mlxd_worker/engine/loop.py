"""The step loop of one loaded model: admit, one prompt chunk, one decode step for all, emit.

Invariants:
- Synchronous and on one thread; it never waits for a client, a clock or a lock.
- At most `rows_max` rows hold caches; at most `waiting_max` more streams wait, in order of arrival.
- A row looks its prompt up when its turn has come, not when it joins: what the row before it has
  just evaluated is there by then. It lets others have its prompt with its first sound token.
- However a row ends, what it has computed is kept for the next prompt that begins alike, unless its
  logits were no numbers.
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
from mlxd_worker.cache.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.forward import decode, made_ready, prefill
from mlxd_worker.engine.request import Event, Failed, StreamId, Submit, Tokens
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampler import TOKEN_INVALID
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
        prefix: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the model's caches over; they must hold no rows. `prefix` is None for none."""
        self.limits = limits
        self._model = model
        self._caches = caches
        self._prefix = prefix or PrefixCache(caches, budget_nbytes=0)
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
        """End every stream with `error` and free its row, which keeps nothing more."""
        for row in self._rows.values():
            self._prefix.leave(row.id, (), sound=False)
        self.fail_all(error)

    def step(self) -> None:
        """Do one round; returns after at most one chunk and one decode step."""
        self._admit()
        self._prefill_oldest()
        self._decode_all()
        self._caches.tend()

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self.limits.rows_max:
            stream, request = next(iter(self._waiting.items()))
            row_id = RowId(self._next_row)
            if not self._caches.join(row_id, tokens=len(request.prompt)):
                return  # nobody overtakes: there is room once rows have moved or left
            self._next_row += 1
            del self._waiting[stream]
            try:
                text = TextStream(self._make_decoder(request.skip_special_tokens), request.stop)
            except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
                self._caches.leave(row_id)
                request.sink.put(_failure(request, error))
                continue
            self._rows[stream] = Row(row_id, request, text, self.limits.context_length)

    def _prefill_oldest(self) -> None:
        row = self._next_to_prefill()
        if row is None:
            return
        stop = self._prefix.next_stop(row.id)
        most = self.limits.prefill_chunk_tokens
        chunk = row.next_chunk(most if stop is None else min(most, stop - row.offset))
        prefill(self._model, self._caches, row, chunk)
        self._prefix.advanced(row.id)

    def _next_to_prefill(self) -> Row | None:
        """Return the oldest row that has something to prefill, now that it has been looked up."""
        for row in self._rows.values():
            if not row.decoding:
                self._begin(row)
                if not row.decoding:
                    return row
        return None

    def _begin(self, row: Row) -> None:
        """Start a row with what former prompts left behind; once."""
        if row.prefill_started_s is not None:
            return
        row.start_prefill(self._clock())
        request = row.request
        found = self._prefix.begin(row.id, request.prompt)
        row.offset = row.cached = found.cached
        row.cache_reason = found.reason
        if not self._prefix.enabled:
            return
        _log.info(
            "prefix hit" if found.hit else "prefix miss",
            request_id=request.request_id,
            stream=request.stream,
            total=found.total,
            cached=found.cached,
            left=found.left,
            reason=found.reason.value,
        )

    def _decode_all(self) -> None:
        rows = [row for row in self._rows.values() if row.decoding]
        if not rows:
            return
        for row in rows:
            self._begin(row)
        rows = made_ready(self._caches, rows)
        drawn = decode(self._model, self._caches, rows)
        now_s = self._clock()
        for row, token_id in zip(rows, drawn, strict=True):
            self._prefix.advanced(row.id)
            self._emit(row, token_id, now_s)

    def _emit(self, row: Row, token_id: int, now_s: float) -> None:
        event: Event
        try:
            event = row.take(token_id, now_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
            event = _failure(row.request, error)
        row.request.sink.put(event)
        if not isinstance(event, Tokens):
            self._release(row.request.stream, sound=token_id != TOKEN_INVALID)
        else:
            self._prefix.publish(row.id)

    def _release(self, stream: StreamId, *, sound: bool = True) -> None:
        row = self._rows.pop(stream)
        self._prefix.leave(row.id, row.output, sound=sound)


def _failure(request: Submit, error: Exception) -> Failed:
    """Log what is wrong with one stream and return what its client is told."""
    error_id = uuid.uuid4().hex[:12]
    _log.error("a row failed", stream=request.stream, error_id=error_id, exc_info=error)
    return Failed(InternalError(error_id))
