"""The prefill of one step: whose prompt is evaluated next, and how much of it.

Invariants:
- A step evaluates as many prompt tokens as the pacer gives it, of one prompt or of several. Several
  are read in one pass, as one list of tokens, where the model and its caches can do that, within
  the memory that the fit has for it (`together_max`); elsewhere each has a pass of its own. Where
  little waits, a few tokens go along in the decode step's pass, which reads the weights for both;
  where passes write in place, all that a step reads does, if the next step is made up ahead.
- Rows go by priority, then by what is left to evaluate over how long they have waited, then by
  deadline and age. So few tokens do not wait for many, a prompt that is known but for a few waits
  for nobody's long one, and a long one's turn comes nearer while it waits. In any case the oldest
  row is passed over no more often than in the waiting queue (`Turns`).
- A row looks its prompt up when its turn has come, not when it joins: what others have evaluated is
  there by then. While another one evaluates what both begin with, it waits for that.
- Where an image's places see each other no chunk ends within it (`spans`).
- What is on its way from the disk is put in as it arrives, a block a row and step, or beside rows
  that decode as much of one as their step has time for; the row's turn comes when no more of it
  does, and until then it holds nobody up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from mlxd_models.sizes.pass_sizes import together_max
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.arenas.chunks import Attended
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.prefix.lookup import Lookup, begin_alike
from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.engine.pacing import Pacer
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.stepping.base import Carried, Stepper
from mlxd_worker.engine.stepping.chunking import Chunking, is_alone
from mlxd_worker.engine.stepping.forward import RowChunk, prefill
from mlxd_worker.engine.waiting import Turns
from mlxd_worker.models.base import Passes

SHARED_MIN_TOKENS: Final = 64
"""So many tokens that two prompts begin with are worth waiting for."""

JOINED_TOKENS: Final = 32
"""What a decode step's pass takes along: 8 rows of a 100 MB model and 32 tokens take 29 ms together
on two cores, one after the other 39; with 64 tokens 42 and 52, with 127 nothing is gained."""

JOINED_PROMPTS_MAX: Final = 4
"""Of so many prompts: each has attention calls of its own."""

WAITED_MIN_S: Final = 1e-3
"""A row counts as having waited at least so long."""

_log = get_logger("engine")


class Prefill:
    """Brings rows through their prompts. One owner: the engine."""

    def __init__(
        self,
        model: Passes,
        caches: RowCaches,
        prefix: PrefixCache,
        pacer: Pacer,
        clock: Callable[[], float],
        *,
        stepper: Stepper,
        together: bool,
        gallery: Gallery | None = None,
    ) -> None:
        """Read the prompts of rows of `caches`.

        stepper: what steps these rows, and may take prompts' tokens along. together: whether one
        pass reads several prompts. gallery: what sees their images; None: they have none.
        """
        self._gallery = gallery
        self._stepper = stepper
        self._model = model
        self._caches = caches
        self._prefix = prefix
        self._pacer = pacer
        self._clock = clock
        self._turns = Turns()
        self._known: dict[RowId, int] = {}
        self._known_version = -1
        self._joins = stepper.joins
        self._together = together
        context, few = caches.table.context_max, caches.bounded_shapes
        self._most = together_max(context, on_cpu=not few)
        self._chunking = Chunking.of(model.capabilities, caches)
        self._company: list[RowChunk] = []
        """What the next pass reads; empty between steps."""
        self._coming: dict[RowId, int] = {}
        """How many tokens of each row's that is."""
        self._attended = Attended()
        self._joined_tokens = min(JOINED_TOKENS, pacer.chunk_tokens)
        self._waited_s = 0.0

    def receive(self, rows: Collection[Row]) -> None:
        """Put in what has arrived from the disk, before anything else of a step.

        A row starts where it stands when no more comes for it.
        """
        disk = self._prefix.disk
        if disk is None:
            return
        disk.beside_rows = any(row.offset >= row.decodes_from for row in rows)
        if not self._prefix.waiting:
            return
        nbytes_max, put_nbytes = disk.put_nbytes_max, 0
        for row in [row for row in rows if row.id in self._prefix.waiting]:
            if nbytes_max is None:
                self._prefix.receive(row.id)
            elif not put_nbytes or put_nbytes < nbytes_max:
                left_nbytes = nbytes_max - put_nbytes
                put_nbytes += self._prefix.receive(row.id, nbytes_max=left_nbytes)
            start = self._prefix.end_waiting(row.id)
            if start is not None:
                self._start_at(row, start)

    def run(self, rows: Sequence[Row]) -> list[Carried]:
        """Evaluate as many prompt tokens of `rows`, oldest first, as the step may.

        Return what the decode step is to take along; call `carry` once that is evaluated.
        """
        joined = self._choose(rows)
        if not joined and self._goes_along(self._company):
            return self._hand_over()
        self._read()
        return joined

    def _choose(self, rows: Sequence[Row]) -> list[Carried]:
        """Choose whose tokens go along, and whose are read next; read those that fill a pass."""
        joined: list[Carried] = []
        reading = [row for row in rows if row.offset < row.decodes_from]
        waiting = [row for row in reading if row.id not in self._prefix.waiting]
        self._pacer.begin_step(
            self._clock(),
            decoding=len(reading) < len(rows),
            waiting_tokens=sum(row.prefill_left for row in waiting),
        )
        if waiting:
            self._forget(waiting)
        able = self._able(waiting, rows)
        now_s = self._clock()
        ranks = {row.id: self._rank(row, now_s) for row in able}
        oldest_waits = False
        while able:
            row = self._turns.first_of(able, rank=lambda entry: ranks[entry.id])
            if self._would_have_a_piece(row):
                first = able[0]
                able = [entry for entry in able if not self._would_have_a_piece(entry)]
                oldest_waits = oldest_waits or not able or able[0] is not first
                continue
            self.begin(row)
            if row.id in self._prefix.waiting:
                able = self._able([entry for entry in able if entry is not row], [row])
                continue
            if self._joins and self._pacer.gentle and not is_alone(row) and row.advance is None:
                if not row.decoding:
                    joined.append(self._taken_along(row, joined))
            elif not row.decoding and row.prefill_left and not self._add_next(row):
                return joined
            self._turns.note_turn(by_oldest=row is able[0] and not oldest_waits)
            if self._pacer.over(self._clock()):  # a restore takes time as well
                return joined
            if len(joined) == JOINED_PROMPTS_MAX or self._left_to_join(joined) <= 0:
                return joined
            # The others have been looked at: only this one has just begun.
            able = self._able([entry for entry in able if entry is not row], [row])
        return joined

    def _would_have_a_piece(self, row: Row) -> bool:
        """Tell whether a long prompt is to wait for a step that has more left than a small piece.

        What follows the piece would begin where kernels for whole chunks do not serve.
        """
        if not self._chunking.copies or row.decoding:
            return False
        left = row.prefill_left - (0 if row.begun else self._known_of(row))
        return self._pacer.leaves_a_piece(left, self._clock())

    def _able(self, waiting: Sequence[Row], others: Sequence[Row]) -> list[Row]:
        """Return the rows that are not to wait for what one of `others` is about to have."""
        return [row for row in waiting if row.begun or not self._shares(row, others)]

    @property
    def pending(self) -> bool:
        """Whether parts of former prompts wait to be handed to the disk."""
        return self._prefix.disk is not None and self._prefix.disk.pending

    def tend(self, rows: Iterable[Row]) -> None:
        """Hand one part of a former prompt to the disk, where one waits; once a step.

        Where `rows`, all there are, have nothing to do but wait for the disk, so does this, not
        for long.
        """
        disk = self._prefix.disk
        if disk is None:
            return
        waiting = [row.id in self._prefix.waiting for row in rows]
        disk.token_s = self._pacer.prefill_token_s
        disk.tend(idle=not waiting)
        if waiting and all(waiting):
            disk.tier.wait()

    def take_waited(self) -> float:
        """Return for how many seconds passes were waited for since this was last asked."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def carry(self, done: Sequence[Carried]) -> None:
        """Learn that what `run` returned has been evaluated, or goes behind a step."""
        for entry in done:
            self._prefix.advance(entry.row.id)
        if self._stepper.carries:
            self._pacer.note_behind(sum(len(entry.tokens) for entry in done))

    def evaluate(self, alone: Sequence[Carried]) -> None:
        """Evaluate what `run` returned in passes of their own: no row decodes after all."""
        for entry in alone:
            prefill(self._model, self._caches, [(entry.row, entry.tokens)])
            self._prefix.advance(entry.row.id)

    def _left_to_join(self, joined: Sequence[Carried]) -> int:
        return self._joined_tokens - sum(len(entry.tokens) for entry in joined)

    def begin(self, row: Row) -> None:
        """Start a row with what former prompts left behind; once."""
        if row.begun:
            return
        row.prefill_started_s = self._clock()
        request = row.request
        if row.embeds:  # every token's state is asked for: nothing of former prompts helps
            return
        self._prefix.token_s = self._pacer.prefill_token_s
        start = self._prefix.begin(row.id, request.looked_up, most=_reusable(row))
        if row.id not in self._prefix.waiting:
            self._start_at(row, start)

    def _start_at(self, row: Row, start: Lookup) -> None:
        row.offset = row.cached = start.cached
        row.cache_reason = start.reason
        if not self._prefix.enabled:
            return
        _log.info(
            "prefix hit" if start.hit else "prefix miss",
            request_id=row.request.request_id,
            stream=row.request.stream,
            total=start.total,
            cached=start.cached,
            from_disk=start.from_disk,
            left=start.left,
            reason=start.reason.value,
        )

    def _taken_along(self, row: Row, others: Sequence[Carried]) -> Carried:
        """Reserve the row's next few tokens."""
        tokens = row.next_chunk(min(self._wanted_count(row), self._left_to_join(others)))
        carried = Carried(row, tokens)
        self._caches.reserve(row.id, tokens=row.offset + len(tokens) + carried.draws)
        return carried

    def _wanted_count(self, row: Row) -> int:
        """Return how many tokens the row's next pass may have at most."""
        stop = self._caches.contents.next_stop(row.id)
        return row.prefill_left if stop is None else min(row.prefill_left, stop - row.offset)

    def _add_next(self, row: Row) -> bool:
        """Put the row's next chunk among those to be read; False where the step may do no more."""
        wanted, capacity = self._wanted_count(row), self._caches.table.place(row.id).capacity
        images, fit = row.request.images, self._chunking.fit
        fit_here = partial(fit, images, row.offset, wanted=wanted, capacity=capacity)
        tokens = self._pacer.chunk(wanted, self._clock(), fit=fit_here)
        if not tokens:
            return False
        beyond = not self._attended.beside(tokens, row.offset + tokens).within(self._most)
        chunk = (row, row.next_chunk(tokens))
        if beyond or self._is_better_apart(chunk):
            self._read()
        self._company.append(chunk)
        self._coming[row.id] = tokens
        self._attended = self._attended.beside(tokens, row.offset + tokens)
        if not self._together:
            self._read()
        return True

    def _read(self) -> None:
        """Evaluate the chunks that were put together in one pass, and forget them."""
        company, self._company, self._attended = self._company, [], Attended()
        self._coming.clear()
        if not company:
            return
        in_place = self._chunking.reads_in_place(company)
        if not in_place:
            self._stepper.rest()
        inlays = () if self._gallery is None else self._gallery.inlays_of(company)
        # Behind a step that is under way nobody waits: what it takes, steps take longer.
        waits = not (in_place and self._stepper.ahead and self._pacer.prefill_token_s > 0.0)
        started_s = self._clock()
        prefill(self._model, self._caches, company, wait=waits, inlays=inlays)
        for row, _ in company:
            self._prefix.advance(row.id)
        read = sum(len(tokens) for _, tokens in company)
        if waits:
            took_s = self._clock() - started_s
            self._waited_s += took_s
            self._pacer.learn_prefill(read, took_s)
        else:
            self._pacer.note_behind(read)

    def _goes_along(self, company: Sequence[RowChunk]) -> bool:
        """Tell whether the step that is made up next may take a pass's chunks along.

        Only once passes have been timed, and of rows that the step may draw first tokens for. Those
        behind images stand elsewhere for rotations than a prompt's tokens do.
        """
        stepper = self._stepper
        if not (company and stepper.carries and stepper.ahead and self._pacer.prefill_token_s):
            return False
        able = all(row.foreseeable and not row.request.images for row, _ in company)
        return able and self._chunking.reads_in_place(company)

    def _hand_over(self) -> list[Carried]:
        """Return what was to be read, for a step's pass, and forget it."""
        company, self._company, self._attended = self._company, [], Attended()
        self._coming.clear()
        return [Carried(row, tuple(tokens)) for row, tokens in company]

    def _is_better_apart(self, chunk: RowChunk) -> bool:
        """Tell whether a chunk and those before it are too much for one pass in place.

        Then each has a pass of its own, in place or by products of one row: several rows' products
        go by MLX's writes, which take as long as the arena is large.
        """
        chunking, company = self._chunking, [*self._company, chunk]
        return bool(chunking.in_place and self._company) and not chunking.reads_in_place(company)

    def _rank(self, row: Row, now_s: float) -> tuple[float, ...]:
        request, left = row.request, row.prefill_left
        if not row.begun:
            left = max(left - self._known_of(row), 0)
        waited_s = max(now_s - request.submitted_s, WAITED_MIN_S)
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        return (-request.priority, left / waited_s, deadline_s)

    def _known_of(self, row: Row) -> int:
        """Return how much of a row's prompt would be found if it began now."""
        known = self._known.get(row.id)
        if known is None:
            prompt, most = row.request.looked_up, _reusable(row)
            known = self._known[row.id] = self._prefix.count_known(prompt, most=most)
        return known

    def _forget(self, waiting: Sequence[Row]) -> None:
        """Drop what was known of rows that have begun or left, and of all where more may be."""
        if self._known_version != self._prefix.version:
            self._known_version = self._prefix.version
            self._known.clear()
        elif len(self._known) > len(waiting):
            self._known.clear()

    def _shares(self, row: Row, rows: Sequence[Row]) -> bool:
        """Tell whether another row, of no less priority, will sooner have what both begin with."""
        if not self._prefix.enabled or row.embeds:
            return False
        prompt, known = row.request.looked_up, self._known_of(row)
        for other in rows:
            if (
                not other.begun
                or other.drawn
                or other.embeds
                or other.request.priority < row.request.priority
            ):
                continue
            left = other.prefill_left - self._coming.get(other.id, 0)
            both = known + max(left, SHARED_MIN_TOKENS)
            if both <= _reusable(row) and begin_alike(prompt, other.request.looked_up, both):
                return True
        return False


def _reusable(row: Row) -> int:
    """Return how many of a prompt's tokens may come from former ones: never the last."""
    most = len(row.request.prompt) - 1
    return most if row.scores is None else min(row.scores.reusable, most)
