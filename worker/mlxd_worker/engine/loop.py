"""The step loop of one loaded model: admit, prefill, one decode step for all, emit, tend.

Invariants:
- Synchronous and on one thread; it never waits for a client. For masks, which other threads make,
  a step waits at most CONSTRAINT_MASK_WAIT_S, and twice in all: the rows whose masks take longer
  sit steps out (`advance`). What they have drawn is told as soon as their constraints have it.
- At most `rows_max` rows hold caches; at most `waiting_max` more streams wait (`waiting`).
- A step evaluates at most one whole pass of prompt tokens (`prefilling`, `pacing`): within so long
  whoever is cancelled, or too late, is gone. Who is too late while waiting is never evaluated.
- A row lets others have its prompt with its first sound token. However it ends, what it has
  computed is kept for the next prompt that begins alike, unless its logits were no numbers.
- A stream that is known here gets exactly one end, unless it is cancelled.
- A fault that concerns one row fails that row alone; any other exception leaves `step`, and the
  owner must `fail_all` and end: the caches are then in an unknown state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mlxd_shared import config
from mlxd_shared.domain.errors import DeadlinePassed, MlxdError, QueueFull
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.admission import KV_UNBOUNDED, check_join, count_alike
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.engine.judging import catch_up, fail, failure_of, judge_by, judge_plainly
from mlxd_worker.engine.masks.advance import Advance, Masks
from mlxd_worker.engine.masks.holds import hold_of
from mlxd_worker.engine.masks.threads import MaskThreads
from mlxd_worker.engine.pacing import Pacer
from mlxd_worker.engine.prefilling import Prefill
from mlxd_worker.engine.request import Event, Failed, Occupancy, StreamId, Submit, Tokens
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampling.sampler import TOKEN_INVALID
from mlxd_worker.engine.stepping.base import Carried, Run, Stepper, settle
from mlxd_worker.engine.stepping.chunking import reads_together
from mlxd_worker.engine.text import TextDecoder, TextStream
from mlxd_worker.engine.waiting import WaitingQueue
from mlxd_worker.models.base import Passes

MakeDecoder = Callable[[Submit], TextDecoder]
"""Returns a fresh decoder for one stream."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's bounds for one model."""

    context_length: int
    rows_max: int
    waiting_max: int = config.WAITING_STREAMS_LIMIT
    """Whoever submits refuses sooner (`Streams`), and says when to come back."""
    prefill_chunk_tokens: int = config.PREFILL_CHUNK_TOKENS
    """The most prompt tokens that one step evaluates on a CPU, or of rows that are read alone."""
    prefill_pass_tokens: int = config.PREFILL_PASS_TOKENS
    """The most that one evaluates elsewhere."""
    inter_token_s: float = config.TARGET_INTER_TOKEN_S
    """What prefill leaves between two tokens of a row, where decoding itself is faster."""
    kv_nbytes_max: int = KV_UNBOUNDED
    """What the load has reserved for the rows' caches."""
    mask_threads: int = 1
    """How many rows' masks are made at once."""


class Engine:
    """Serves the streams of one model. One owner: the engine thread."""

    def __init__(
        self,
        model: Passes,
        caches: RowCaches,
        make_decoder: MakeDecoder,
        limits: Limits,
        *,
        stepper: Stepper,
        prefix: PrefixCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        gallery: Gallery | None = None,
        make_masks: Callable[[int], Masks] | None = None,
    ) -> None:
        """Take the model's caches over; they must hold no rows. `prefix` is None for none.

        stepper: what steps the rows of these caches (`stepping.choose`). gallery: what sees the
        images of prompts; None: none has any. make_masks: returns what makes so many rows' masks at
        once; None: threads of this engine's own.
        """
        self.limits = limits
        self._model = model
        self._caches = caches
        self._prefix = prefix or PrefixCache(caches, budget_nbytes=0)
        self._make_decoder = make_decoder
        self._clock = clock
        self._waiting = WaitingQueue()
        self._rows: dict[StreamId, Row] = {}
        self._next_row = 0
        together = reads_together(model.capabilities, caches)
        self._pacer = Pacer(
            target_s=limits.inter_token_s,
            chunk_tokens=limits.prefill_chunk_tokens,
            # A CPU is busy with a chunk: larger passes would only take more memory.
            pass_tokens=limits.prefill_pass_tokens if together and caches.bounded_shapes else 0,
            few_widths=caches.bounded_shapes,
        )
        self._stepper = stepper
        make_masks = make_masks or partial(MaskThreads, clock=clock)
        self._masks = make_masks(limits.mask_threads)
        self._overlaps = model.capabilities.prompts_in_place > 0
        caches.precede(stepper.rest)
        self._unjudged: dict[StreamId, Run] = {}
        """What was drawn for rows whose constraints have to go on first."""
        self._decoded_s = 0.0
        """When the last decode step was told: one that is ahead counts from then."""
        self._prefill = Prefill(
            model, caches, self._prefix, self._pacer, clock,
            stepper=stepper, together=together, gallery=gallery,
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._rows or self._waiting) or self._prefill.pending

    @property
    def can_guess(self) -> bool:
        """Whether the model's caches can take wrong guesses back."""
        return self._stepper.guesses

    @property
    def streams(self) -> int:
        """How many streams are running or waiting."""
        return len(self._rows) + len(self._waiting)

    def occupancy(self) -> Occupancy:
        """Return how busy the engine is now."""
        oldest = self._waiting.oldest
        return Occupancy(
            running=len(self._rows),
            waiting=len(self._waiting),
            oldest_wait_s=max(self._clock() - oldest.submitted_s, 0.0) if oldest else 0.0,
            kv_tokens_used=sum(row.offset for row in self._rows.values()),
            kv_tokens_capacity=self.limits.rows_max * self.limits.context_length,
        )

    def marks(self) -> list[tuple[int, ...]]:
        """Return of each running stream: number, positions, tokens, what holds it, latest token."""
        return [
            (n, row.offset, len(row.output), hold_of(row.matcher, row.advance), *row.output[-1:])
            for n, row in sorted(self._rows.items())
        ]

    def submit(self, request: Submit) -> None:
        """Take a stream; where the queue is full, its sink gets QueueFull."""
        assert 0 < len(request.prompt) < self.limits.context_length, "checked by the submitter"
        if self.streams >= self.limits.rows_max + self.limits.waiting_max:
            request.sink.put(Failed(QueueFull("waiting streams", self.limits.waiting_max)))
            return
        self._waiting.push(request)

    def cancel(self, stream: StreamId) -> None:
        """Forget a stream and free its row; one that is not known is ignored."""
        if not self._waiting.remove(stream) and stream in self._rows:
            self._release(stream)

    def fail_all(self, error: MlxdError) -> None:
        """End every stream with `error`, touching no cache."""
        rows, waiting = list(self._rows.values()), self._waiting.take_all()
        self._rows.clear()
        self._unjudged.clear()
        for request in waiting:
            request.sink.put(Failed(error))
        for row in rows:
            _abandon(row)
            fail(row, error)

    def release_all(self, error: MlxdError) -> None:
        """End every stream with `error` and free its row, which keeps nothing more."""
        for row in self._rows.values():
            self._prefix.leave(row.id, (), sound=False)
        self.fail_all(error)

    def step(self) -> None:
        """Do one round; returns after at most one whole pass over prompts and one decode step."""
        self._drop_late(self._clock())
        self._prefill.receive(self._rows.values())
        stepper = self._stepper
        if not any(row.decoding and row.advance is None for row in self._rows.values()):
            stepper.drop()  # rows whose masks are being made take up nothing
        if stepper.ahead and not (self._overlaps or self._calm):
            self._decode_all(())  # what is under way is told before prompts take their time
        else:
            self._admit()
            carried = self._prefill.run(tuple(self._rows.values()))
            self._end_embedded()
            self._decode_all(carried)
        self._caches.tend(before=stepper.rest)
        self._prefill.tend(self._rows.values())

    @property
    def _calm(self) -> bool:
        """Whether no prompt can be evaluated in the next step, as far as is known."""
        full = len(self._rows) == self.limits.rows_max
        reading = [row.id for row in self._rows.values() if row.offset < row.decodes_from]
        waiting = self._prefix.waiting  # for the disk: it has been asked whether they go on
        return (full or not self._waiting) and all(row in waiting for row in reading)

    def _drop_late(self, now_s: float) -> None:
        """End the streams that no client waits for."""
        for request in self._waiting.take_late(now_s):
            request.sink.put(Failed(DeadlinePassed()))
        limited = [row for row in self._rows.values() if row.request.deadline_s is not None]
        for row in [row for row in limited if row.request.late(now_s)]:
            fail(row, DeadlinePassed(row.generated))
            self._release(row.request.stream)

    def _admit(self) -> None:
        while len(self._rows) < self.limits.rows_max:
            request = self._waiting.peek()
            if request is None:
                return
            row_id, tokens, coming = RowId(self._next_row), len(request.prompt), self._like(request)
            longest, most = self._longest(request), self.limits.kv_nbytes_max
            check_join(
                self._caches, tokens=tokens, tokens_max=longest, coming=coming, nbytes_max=most
            )
            if not self._caches.join(row_id, tokens=tokens, tokens_max=longest, coming=coming):
                return  # no stream overtakes: there is room once rows have moved or left
            self._next_row += 1
            self._waiting.pop()
            try:
                text = TextStream(self._make_decoder(request), request.stop)
                row = Row(row_id, request, text, self.limits.context_length)
            except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
                self._caches.leave(row_id, sound=False)
                request.sink.put(failure_of(request, error))
                continue
            self._rows[request.stream] = row
            if row.advance is not None:
                self._masks.begin(row.advance)

    def _like(self, request: Submit) -> int:
        """Return how many streams of a class are about to have a row, this one included."""
        if self._caches.in_place:
            return 1  # there is one arena, with room for all
        free = self.limits.rows_max - len(self._rows)
        return count_alike(request, self._waiting, most=free, class_of=self._class)

    def _class(self, request: Submit) -> int:
        return self._caches.table.class_for(len(request.prompt), self._longest(request))

    def _longest(self, request: Submit) -> int:
        """Return how many tokens a stream may come to, its prompt's included."""
        new, most = request.max_tokens, self.limits.context_length
        return most if new is None else min(request.prompt_tokens + new, most)

    def _end_embedded(self) -> None:
        """End the rows whose prompts are to become vectors and are evaluated to their ends."""
        embedding = [row for row in self._rows.values() if row.pool is not None]
        for row in [row for row in embedding if not row.prefill_left]:
            row.request.sink.put(judge_by(row, row.finish_embedding))
            self._release(row.request.stream)

    def _decode_all(self, carried: Sequence[Carried]) -> None:
        """Evaluate every decoding row's next token, and what prompts have in the same pass."""
        # One that is ahead counts from the last one, but for what prompts were waited for.
        ahead_s = self._decoded_s + self._prefill.take_waited()
        started_s = ahead_s if self._stepper.ahead else self._clock()
        self._go_on(started_s)
        rows = [
            row
            for row in self._rows.values()
            if row.offset >= row.decodes_from and row.advance is None
        ]
        drawing = [*rows, *(entry.row for entry in carried if entry.draws)]
        # What a plain row that has drawn once will draw cannot fail.
        others = [row for row in drawing if not row.plain or row.first_token_s is None]
        asking = [row for row in others if row.matcher is not None or not row.drawn]
        failed = {row.id for row in asking if not self._prepare(row)}
        if failed:
            rows = [row for row in rows if row.id not in failed]
            carried = [entry for entry in carried if entry.row.id not in failed]
        if not rows:
            self._prefill.evaluate(carried)
            if not carried and self._rows and all(row.decoding for row in self._rows.values()):
                self._masks.wait_for_any(self._advances())
            return
        runs = self._stepper.step(rows, ahead=self._overlaps or self._calm, carried=carried)
        now_s = self._clock()
        self._prefill.carry(carried)
        self._tell(runs, now_s)
        self._go_on(now_s)
        self._decoded_s = self._clock()
        if self._stepper.carries or not carried:
            self._pacer.learn_step(self._decoded_s - started_s)

    def _tell(self, runs: Sequence[Run], now_s: float) -> None:
        """Judge what a step has drawn, and tell the streams."""
        judged = judge_plainly(runs, self._caches, now_s)
        if self._prefix.captures:
            for row_id in judged.moved:
                self._prefix.advance(row_id)
        for row in judged.broken:
            self._release(row.request.stream)
        for run in judged.left:
            row = run.row
            advance = None if row.matcher is None else row.follow(run.drawn[0].token_id)
            if advance is None:
                self._emit(run, now_s)
                if row.advance is not None and row.request.stream in self._rows:
                    # A call has begun, in the middle of its token.
                    self._masks.begin(row.advance)
            else:
                self._unjudged[row.request.stream] = run
                self._masks.begin(advance)

    def _advances(self) -> list[Advance]:
        return [row.advance for row in self._rows.values() if row.advance is not None]

    def _go_on(self, now_s: float) -> None:
        """Judge what was drawn, and let rows whose masks are there draw, or whose never will be."""
        advances = self._advances()
        if not advances:
            return
        self._masks.wait(advances, now_s)
        for row in list(self._rows.values()):
            advance, stream = row.advance, row.request.stream
            if advance is None:
                continue
            seen = advance.seen
            if (seen.late or seen.arrived) and stream in self._unjudged:
                self._emit(self._unjudged.pop(stream), now_s)
            if (seen.late or seen.done) and stream in self._rows:
                self._succeeds(row, row.go_on)

    def _prepare(self, row: Row) -> bool:
        """Make a row ready for its next draw; where that fails, end it alone and return False."""
        self._prefill.begin(row)
        return self._succeeds(row, row.prepare)

    def _succeeds(self, row: Row, act: Callable[[], None]) -> bool:
        """Have a row act; where that fails, end it alone and return False."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row alone
            fail(row, failure_of(row.request, error).error)
            self._release(row.request.stream)
            return False
        return True

    def _emit(self, run: Run, now_s: float) -> None:
        """Judge a row's tokens one by one; what was drawn after the end leaves no trace."""
        row, accepted, put = run.row, run.accepted, run.row.request.sink.put
        if not catch_up(row):
            settle(self._caches, run, judged=1)
            self._release(row.request.stream)
            return
        row.drafted += run.drafted
        events: list[Event] = []
        for judged, drawn in enumerate(run.drawn, start=1):
            row.accepted += judged <= accepted
            row.near_ties += drawn.near_tie
            forced = bool(row.request.forced) and row.forcing
            event = judge_by(row, partial(row.take, drawn.token_id, now_s, drawn.logprobs))
            if row.scores is not None and not isinstance(event, Failed):
                event = replace(event, prompt_logprobs=row.scores.entries)
                row.scores = None
            goes_on = isinstance(event, Tokens)
            if not (forced and goes_on):
                events.append(event)
            # Guesses behind a mark of a call were made without it.
            if not goes_on or (row.matcher is not None and row.is_held):
                break
        settle(self._caches, run, judged=judged)
        self._prefix.advance(row.id)
        row.reported_count = len(row.output)
        for event in events:
            put(event)
        if goes_on:
            self._prefix.publish(row.id)
        else:
            self._release(row.request.stream, sound=drawn.token_id != TOKEN_INVALID)

    def _release(self, stream: StreamId, *, sound: bool = True) -> None:
        row = self._rows.pop(stream)
        row.reported_count = len(row.output)  # nobody asks for what a cancelled one is owed
        self._unjudged.pop(stream, None)
        _abandon(row)
        self._prefix.leave(row.id, row.output[row.request.resumed :], sound=sound)


def _abandon(row: Row) -> None:
    """Let what a row's constraint is at end with the call at hand."""
    if row.advance is not None:
        row.advance.abandoned = True
