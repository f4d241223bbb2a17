"""The step ahead: the next one is ready before the last one's tokens are known.

Invariants:
- Where a step writes the caches in place (`overlaps_steps`) the next one is dispatched at once.
  Elsewhere a step that is dispatched while another is under way copies all keys and values
  (decision 0019): on a CPU the next one is only prepared meanwhile, as a graph, and dispatched as
  soon as the last one's tokens are read; they are told while it runs (decision 0041). Nowhere does
  it hold more bytes than the tokens under way.
- A row is never ahead of anything that the host must decide first: a constraint in force,
  penalties, log-probabilities, guesses, a second look at a nucleus, a larger class. Where a
  constraint that was asleep has woken meanwhile, the pass stands, and the token is drawn anew from
  its logits, which are kept for such rows. A row that draws its last
  token is left out of the next step. Whoever changes the caches' arrays otherwise calls `rest`
  first: what is under way refers to them. A row that is moved then takes along what is ahead.
- Where prompts are written in place (`prompts_in_place`) a row joins a step that is made up ahead,
  and draws its first token with it; elsewhere it has a pass of its own first. The step's pass then
  takes prompts along (`carries`), up to their last tokens: the weights are read once for both, and
  the host prepares one pass. What does not fit goes before it, in a pass of its own.
- What a row has written ahead lies beyond its offset until it is taken up, so a row that ends
  meanwhile leaves no trace of it.
- The device is asked in the order in which its results are needed; nothing is asked twice.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.changes import wait_for_all
from mlxd_worker.cache.layers.tokens import TOKEN_SIZES, is_read_in_place, size_of
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampling.columns import KeptColumns
from mlxd_worker.engine.sampling.drawing import Drawn, draw_all, drawn_alone
from mlxd_worker.engine.sampling.sampler import needs_second_look, sample
from mlxd_worker.engine.stepping.base import Carried, Run, runs_of
from mlxd_worker.engine.stepping.forward import decode, make_ready, prefill
from mlxd_worker.models.base import Batch, Passes

PADDING_MAX: Final = 128
"""A pass with prompts has so many more tokens for nothing, at most, than it and the prompts' own
would have: by arithmetic an H200 computes some 200 of an 8 B model while it reads its weights."""


class Lead(enum.Enum):
    """How far a step is ahead of the tokens before it."""

    MADE_UP = enum.auto()
    """Its graph is there; it is dispatched when they are known."""
    DISPATCHED = enum.auto()


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that is ahead, and what it draws for each row."""

    tokens: mx.array
    """int32 [N], not read yet."""
    index_of: dict[RowId, int]
    offsets: dict[RowId, int]
    """Of each row before the step."""
    logits: mx.array | None
    """What the tokens are drawn from; None where no row can need it again."""


class Ahead:
    """Steps all rows by one token, ahead where that may be. One owner: the engine thread."""

    joins = False
    guesses = False

    def __init__(self, model: Passes, caches: RowCaches, *, lead: Lead) -> None:
        """Step the rows of `caches`."""
        self._model = model
        self._caches = caches
        self._lead = lead
        in_place = model.capabilities.prompts_in_place > 0
        self.carries = in_place and lead is Lead.DISPATCHED
        self._under_way: _UnderWay | None = None
        self._columns = KeptColumns()

    @property
    def ahead(self) -> bool:
        """Whether a step is under way whose tokens are not read yet."""
        return self._under_way is not None

    def step(
        self, rows: Sequence[Row], *, ahead: bool = False, carried: Sequence[Carried] = ()
    ) -> list[Run]:
        """Return what is drawn for each row: what is under way for it, or else a pass of its own.

        Where the same rows will step next, that step is then under way.
        """
        assert self.carries or not carried, "this step takes no prompt along"
        # Rows of a step ahead stay where they are, but one that comes back may have to move.
        rows = make_ready(self._caches, rows, before=self.rest)
        known, fresh = self._split(rows)
        if ahead and known and fresh and self._may_enter(fresh):
            drawn = self._draw(known, known, entering=fresh, carried=carried, ahead=True)
            return runs_of(known, drawn)
        return runs_of(rows, self._draw(rows, known, carried=carried, ahead=ahead))

    def rest(self) -> None:
        """Wait for what is under way: then nothing but the caches refers to their arrays.

        Where passes write in place, prompts and copies may be as well, which no step's tokens tell.
        """
        if self._under_way is not None:
            mx.eval(self._under_way.tokens, self._caches.state())
        if self._caches.in_place:
            wait_for_all()

    def drop(self) -> None:
        """Forget what is under way, once it is done."""
        self.rest()
        self._under_way = None
        self._columns.clear()

    def _split(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Return the rows that have drawn a token in the step under way, and the others."""
        offsets = {} if self._under_way is None else self._under_way.offsets
        known: list[Row] = []
        fresh: list[Row] = []
        for row in rows:
            (known if offsets.get(row.id) == row.offset else fresh).append(row)
        return known, fresh

    def _may_enter(self, rows: Sequence[Row]) -> bool:
        """Tell whether rows that nothing is under way for may have their first token ahead."""
        return self.carries and _all_foreseeable(rows)

    def _draw(
        self,
        rows: Sequence[Row],
        known: Sequence[Row],
        *,
        entering: Sequence[Row] = (),
        carried: Sequence[Carried] = (),
        ahead: bool,
    ) -> list[Drawn]:
        """Return what is drawn for each row, in the rows' order; they have reserved the token.

        known: those of them that have drawn it in the step under way. entering: others, which take
        part in the next step for the first time, where one is ahead. carried: what that one's pass
        takes along, or a pass of its own where there is none.
        """
        step, self._under_way = self._under_way, None
        held = [row for row in known if row.matcher is not None and row.is_held]
        if step is None or len(known) < len(rows) or held:
            self._read_apart(carried)
            return self._draw_some(rows, step, known, ahead=ahead)
        self._take_up(rows)
        following = None
        if ahead:
            following = self._make_up(rows, _tokens_of(step, rows), entering, carried)
        if following is None:
            self._read_apart(carried)
        if self._lead is Lead.DISPATCHED:
            self._dispatch(following)
        drawn = [drawn_alone(token_id) for token_id in _read(step, rows)]
        if self._lead is Lead.MADE_UP:
            self._dispatch(following)
        return drawn

    def _draw_some(
        self, rows: Sequence[Row], step: _UnderWay | None, known: Sequence[Row], *, ahead: bool
    ) -> list[Drawn]:
        """Decode the rows that have nothing under way, and take up what the others have."""
        drawn_for: dict[RowId, Drawn] = {}
        if step is not None and known:
            self._take_up(known)
            for row, token_id in zip(known, _read(step, known), strict=True):
                drawn_for[row.id] = drawn_alone(token_id)
            drawn_for |= self._draw_anew(step, [row for row in known if row.is_held])
        elif step is not None:
            mx.eval(step.tokens)
        fresh = [row for row in rows if row.id not in drawn_for]
        decoded = decode(self._model, self._caches, fresh) if fresh else []
        drawn_for |= {row.id: one for row, one in zip(fresh, decoded, strict=True)}
        drawn = [drawn_for[row.id] for row in rows]
        if ahead and all(one.token_id >= 0 for one in drawn):
            tokens = mx.array([one.token_id for one in drawn], dtype=mx.int32)
            self._dispatch(self._make_up(rows, tokens))
        return drawn

    def _draw_anew(self, step: _UnderWay, rows: Sequence[Row]) -> dict[RowId, Drawn]:
        """Return what is drawn for rows under a mask that was not there when the step was made."""
        if not rows:
            return {}
        assert step.logits is not None, "kept for rows that may be masked"
        logits = step.logits[mx.array([step.index_of[row.id] for row in rows], dtype=mx.int32)]
        drawn = draw_all(logits, [row.draw() for row in rows], [None for _ in rows], along=[])
        return {row.id: one for row, one in zip(rows, drawn, strict=True)}

    def _take_up(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.offset += 1
        ids, offsets = [row.id for row in rows], [row.offset for row in rows]
        self._caches.contents.append_each(ids, offsets, (1,) * len(rows))

    def _read_apart(self, carried: Sequence[Carried]) -> None:
        """Dispatch a pass of their own over prompts' chunks, behind what is under way."""
        if carried:
            chunks = [(one.row, one.tokens) for one in carried]
            prefill(self._model, self._caches, chunks, wait=False)

    def _make_up(
        self,
        rows: Sequence[Row],
        tokens: mx.array,
        entering: Sequence[Row] = (),
        carried: Sequence[Carried] = (),
    ) -> _UnderWay | None:
        """Make up the step after the one that draws `tokens`, for the rows that go on after it.

        And for those that are `entering` it, whose tokens are known, and for those `carried` whose
        prompts end with it.
        """
        places = [index for index, row in enumerate(rows) if row.most - len(row.output) > 1]
        going = [rows[index] for index in places]
        if not going or not self._may_go_on(going):
            return None
        if len(going) < len(rows):
            tokens = tokens[mx.array(places, dtype=mx.int32)]
        draws = [row.draw_after() for row in going] + [row.draw() for row in entering]
        if entering:
            first = mx.array([row.next_token() for row in entering], dtype=mx.int32)
            tokens, going = mx.concatenate([tokens, first]), [*going, *entering]
        offsets = {row.id: row.offset for row in going}
        shifts = [row.shift for row in going]
        batch = Batch.decode(tokens, list(offsets.values()), list(offsets), shifts=shifts)
        if carried and not self._takes_along(batch, carried):
            self._read_apart(carried)
            carried = ()
        hidden = self._forward_with(batch, carried)
        ending = [one.row for one in carried if one.draws]
        for one in carried:
            one.row.offset += len(one.tokens)
        offsets |= {row.id: row.offset for row in ending}
        draws += [row.draw() for row in ending]
        going = [*going, *ending]
        logits = self._model.logits(hidden)
        drawn = sample(logits, draws, hopeful=False, kept=self._columns)
        # They stand there once the step is taken up.
        self._caches.contents.cut_back_each(offsets)
        index_of = {row.id: index for index, row in enumerate(going)}
        followed = [row for row in going if row.matcher is not None]
        return _UnderWay(drawn, index_of, offsets, logits if followed else None)

    def _takes_along(self, batch: Batch, carried: Sequence[Carried]) -> bool:
        """Tell whether one pass in place can be over the rows' tokens and what is carried.

        And whether it should: a pass is as large as the next of few sizes, so that a prompt that
        fills one may double it.
        """
        rows, counts = len(batch.rows), [len(one.evaluated) for one in carried]
        alone = size_of(sum(len(one.tokens) for one in carried), TOKEN_SIZES)
        along = size_of(rows + sum(counts), TOKEN_SIZES)
        if alone is None or along is None or along - alone - rows > PADDING_MAX:
            return False
        ends = [one.row.offset + count for one, count in zip(carried, counts, strict=True)]
        most = self._model.capabilities.prompts_in_place
        return is_read_in_place([*batch.lengths, *ends], [*[1] * rows, *counts], most=most)

    def _forward_with(self, batch: Batch, carried: Sequence[Carried]) -> mx.array:
        """Return the hidden rows of a step's tokens, and of the last tokens of prompts that end.

        Those that are carried stand where their chunks end, these last ones included.
        """
        if not carried:
            return self._model.forward(batch, self._caches)
        chunks = [(one.evaluated, one.row.offset, one.row.id) for one in carried]
        hidden = self._model.forward(batch.beside(chunks), self._caches)
        drawing = list(range(len(batch.rows)))
        stop = len(drawing)
        for one, (evaluated, _, _) in zip(carried, chunks, strict=True):
            stop += len(evaluated)
            if one.draws:
                drawing.append(stop - 1)
        return hidden[mx.array(drawing, dtype=mx.int32)]

    def _may_go_on(self, rows: Sequence[Row]) -> bool:
        """Tell whether all rows can go on before their tokens are known; they stand after these."""
        if self._lead is Lead.MADE_UP:
            options = [row.request.sampling for row in rows if row.request.sampling.temperature]
            if any(needs_second_look(one, self._model.vocab_size) for one in options):
                return False
        places = self._caches.table.places([row.id for row in rows])
        full = [row for row, at in zip(rows, places, strict=True) if row.offset >= at.capacity]
        return not full and _all_foreseeable(rows)

    def _dispatch(self, step: _UnderWay | None) -> None:
        if step is not None:
            mx.async_eval(step.tokens, self._caches.state())  # type: ignore[no-untyped-call]
        self._under_way = step


def _all_foreseeable(rows: Sequence[Row]) -> bool:
    """Tell whether all rows are `foreseeable`; a plain one always is, and costs no call."""
    others = [row for row in rows if not row.plain]
    return all(row.foreseeable for row in others)


def _tokens_of(step: _UnderWay, rows: Sequence[Row]) -> mx.array:
    """Return what the step draws for these rows, for the pass that follows; lazy."""
    indices = [step.index_of[row.id] for row in rows]
    if indices == list(range(step.tokens.shape[0])):
        return step.tokens
    return step.tokens[mx.array(indices, dtype=mx.int32)]


def _read(step: _UnderWay, rows: Sequence[Row]) -> list[int]:
    """Wait for the step's tokens, and return those of these rows.

    They are chosen here: an array of theirs alone would be there once the pass that follows is.
    """
    drawn, index_of = cast("list[int]", step.tokens.tolist()), step.index_of
    return [drawn[index_of[row.id]] for row in rows]
