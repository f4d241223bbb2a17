"""Who guesses in a step, how wide it is, and what is learnt from it.

Invariants:
- A row guesses only where its request and its caches allow it, and never more than it may still
  generate less one: the last token of a stream is never evaluated.
- A row that must report log-probabilities, or follows a constraint, never guesses; beside others
  that do it takes its one token of the step.
- A row that cannot go back (a window of its has wrapped) steps plainly. A model that never can (a
  recurrent state) has no speculator at all (`stepping.choose`).
- A step without guesses is the plain stepper's, the whole of it; that one knows of no
  guesses. Here is only measured what it took.
- A step that is ahead of its tokens leaves no room for guesses: where they would pay meanwhile no
  step is ahead of it, and the next one is chosen by what is known then.
- A guess that was not run is still held against the token that was drawn, so what guesses are worth
  is known at no cost.
- What is kept of a row goes with the first step without it.
- Where no pass of several tokens could be run for any row, nobody looks anything up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from mlxd_models.sizes.pass_sizes import DRAFTED_TOKENS_MAX
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.shapes import WIDE_SLOTS_MAX, WIDE_WIDTH, AttentionShape
from mlxd_worker.cache.layers.tokens import is_read_in_place
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.speculation.depth import (
    PLAIN,
    WIDTHS,
    Choice,
    DepthController,
    Limits,
    Offer,
    Record,
)
from mlxd_worker.engine.speculation.drafts import Drafter, Guess, MakeDrafter, PromptLookup
from mlxd_worker.engine.speculation.verify import Guesses, count_agreed, decode_wide
from mlxd_worker.engine.stepping.base import Carried, Run, Stepper
from mlxd_worker.engine.stepping.forward import make_ready, prefill
from mlxd_worker.models.base import Passes

PASS_TOKENS_MAX: Final = 512
"""Rows times width of one step: what the activations of a prompt's chunk have room for."""


@dataclass(slots=True)
class SpeculationCounts:
    """What guessing has done, since the process began."""

    drafted_tokens: int = 0
    """Guesses that were judged by the model."""
    accepted_tokens: int = 0
    """Those of them that were right."""


@dataclass(slots=True)
class _Guesser:
    """One row's drafter, and how well it has done."""

    drafter: Drafter
    record: Record
    pushed: int = 0
    """Generated tokens that the drafter has seen, beyond the prompt it began with."""


class Speculator:
    """Steps the rows of one engine, guessing where it pays. One owner: the engine thread."""

    guesses = True

    def __init__(
        self,
        model: Passes,
        caches: RowCaches,
        plain: Stepper,
        *,
        clock: Callable[[], float],
        depth_default: int,
        make_drafter: MakeDrafter = PromptLookup,
        controller: DepthController | None = None,
        counts: SpeculationCounts | None = None,
    ) -> None:
        """Guess for the rows of `caches`; tell `counts`.

        plain: what steps rows that guess nothing. depth_default: the most tokens that a row guesses
        whose request leaves it open; 0 for none.
        """
        self.counts = counts or SpeculationCounts()
        self._plain = plain
        self._model = model
        self._caches = caches
        self._clock = clock
        self._depth_default = depth_default
        self._make_drafter = make_drafter
        # In place all passes are over so many tokens, whose rows they are: no shape is new.
        few = caches.bounded_shapes and not caches.in_place
        self._shapes = frozenset(caches.shapes()) if few else None
        """Those of attention that were warmed; None where any will do."""
        self._widths = (1, WIDE_WIDTH) if caches.bounded_shapes else WIDTHS
        self._controller = controller or DepthController(widths=self._widths)
        self._pooled = Record()
        self._guessers: dict[RowId, _Guesser] = {}
        self._told_s = 0.0
        """When the last plain step's tokens were there."""

    @property
    def joins(self) -> bool:
        """As the plain stepper: where rows guess, prompts are evaluated in passes of their own."""
        return self._plain.joins

    @property
    def carries(self) -> bool:
        """As the plain stepper: no step with guesses is made up ahead."""
        return self._plain.carries

    @property
    def ahead(self) -> bool:
        """As the plain stepper: a step with guesses is none."""
        return self._plain.ahead

    def step(
        self, rows: Sequence[Row], *, ahead: bool = False, carried: Sequence[Carried] = ()
    ) -> list[Run]:
        """Evaluate each row's next token, and guesses where that pays; return the rows' runs."""
        guesses = self._guess(rows)
        choice = self._choice(rows, guesses)
        if choice.width > 1 and self._plain.ahead:
            choice, ahead = PLAIN, False
        if choice.width == 1:
            runs = self._step_plainly(rows, ahead=ahead, carried=carried)
        else:
            for one in carried:
                prefill(self._model, self._caches, [(one.row, one.tokens)])
            guessing = [row for row in rows if row.id in guesses] if choice.apart else rows
            runs = self._step_wide(guessing, _cut(guesses, choice.width - 1), width=choice.width)
            if len(guessing) < len(rows):
                runs += self._step_plainly([row for row in rows if row.id not in guesses])
        if guesses:  # without any there is nothing to count
            self._learn(runs, guesses)
        return runs

    def rest(self) -> None:
        """As the plain stepper."""
        self._plain.rest()

    def drop(self) -> None:
        """As the plain stepper."""
        self._plain.drop()

    def _step_plainly(
        self, rows: Sequence[Row], *, ahead: bool = False, carried: Sequence[Carried] = ()
    ) -> list[Run]:
        was_ahead = self._plain.ahead
        started_s = self._told_s if was_ahead else self._clock()
        runs = self._plain.step(rows, ahead=ahead, carried=carried)
        self._told_s = self._clock()
        # The first step ahead has most of the next one's work in it, and the last one little.
        if not carried and self._plain.ahead == was_ahead:
            self._controller.learn_pass(len(rows), 1, self._told_s - started_s)
        return runs

    def _step_wide(self, rows: Sequence[Row], guesses: Guesses, *, width: int) -> list[Run]:
        started_s = self._clock()
        if self._caches.in_place:
            self._plain.rest()  # a long row's is read by products, which write its arrays
        rows = make_ready(self._caches, rows, width=width)
        runs = decode_wide(self._model, self._caches, rows, guesses, width=width)
        self._controller.learn_pass(len(rows), width, self._clock() - started_s)
        return runs

    def _guess(self, rows: Sequence[Row]) -> dict[RowId, Guess]:
        """Return what each row could guess; the drafters have then seen all that was generated."""
        if self._guessers:
            for gone in self._guessers.keys() - {row.id for row in rows}:
                del self._guessers[gone]
        guesses: dict[RowId, Guess] = {}
        if not self._controller.looks(len(rows)) or not self._may_widen(rows):
            return guesses
        for row in rows:
            depth = self._depth(row)
            if depth <= 0 or not self._caches.contents.takes_back(row.id, 2):
                continue
            guess = self._guesser(row).drafter.guess(depth)
            guess = None if guess is None else _before_end(row, guess)
            if guess is not None:
                guesses[row.id] = guess
        return guesses

    def _depth(self, row: Row) -> int:
        """Return how many tokens the row may guess."""
        request = row.request
        held = row.matcher is not None and row.is_held
        forcing = bool(request.forced) and row.forcing
        if held or forcing or request.top_logprobs is not None:
            return 0
        depth = request.speculation_depth
        return min(self._depth_default if depth is None else depth, row.left - 1, WIDTHS[-1] - 1)

    def _guesser(self, row: Row) -> _Guesser:
        guesser = self._guessers.get(row.id)
        if guesser is None:
            drafter = self._make_drafter(row.request.prompt)
            guesser = self._guessers[row.id] = _Guesser(drafter, Record(pooled=self._pooled))
        for token_id in row.output[row.request.resumed + guesser.pushed :]:
            guesser.drafter.push(token_id)
        guesser.pushed = row.drawn
        return guesser

    def _choice(self, rows: Sequence[Row], guesses: dict[RowId, Guess]) -> Choice:
        if not guesses:
            return PLAIN
        offers = [
            Offer(len(guess.tokens), guess.agreed, self._guessers[row_id].record)
            for row_id, guess in guesses.items()
        ]
        return self._controller.choose(len(rows), offers, partial(self._limits, rows, guesses))

    def _limits(self, rows: Sequence[Row], guesses: dict[RowId, Guess]) -> Limits:
        shared = guessing = self._width_max(rows)
        if len(guesses) < len(rows):
            guessing = self._width_max([row for row in rows if row.id in guesses])
        return Limits(guessing, shared)

    def _width_max(self, rows: Sequence[Row]) -> int:
        """Return the widest pass that all of `rows` can take."""
        return max(width for width in self._widths if width == 1 or self._allows(rows, width))

    def _allows(self, rows: Sequence[Row], width: int) -> bool:
        """Tell whether all rows can take `width` tokens and go back."""
        table, contents = self._caches.table, self._caches.contents
        if len(rows) * width > PASS_TOKENS_MAX or not self._is_warm(rows, width):
            return False
        return all(
            row.offset + width <= table.context_max and contents.takes_back(row.id, width)
            for row in rows
        )

    def _may_widen(self, rows: Sequence[Row]) -> bool:
        """Tell whether any of the rows can guess at all: else nobody need look anything up."""
        if self._caches.in_place:
            return self._reads_in_place(rows, 1)
        if self._shapes is None or len(rows) == 1:
            return True
        arenas = self._caches.table.arenas
        wide = (AttentionShape(arena.capacity, arena.slots, WIDE_WIDTH) for arena in arenas)
        return not self._shapes.isdisjoint(wide)

    def _is_warm(self, rows: Sequence[Row], width: int) -> bool:
        """Tell whether such a step takes no new shapes; a single row's is that of a chunk."""
        if self._caches.in_place:
            return self._reads_in_place(rows, width)
        if self._shapes is None or len(rows) == 1:
            return True
        table = self._caches.table
        slots = {arena.arena: arena.slots for arena in table.arenas}
        places = {table.place(row.id) for row in rows}
        return self._shapes.issuperset(
            AttentionShape(place.capacity, slots[place.arena], width) for place in places
        )

    def _reads_in_place(self, rows: Sequence[Row], width: int) -> bool:
        """Tell whether a pass in place reads so many tokens of each row; of a single one any does.

        More rows than wide shapes have slots elsewhere are busy enough with one token each.
        """
        if len(rows) == 1:
            return True
        most = self._model.capabilities.prompts_in_place
        able = most > 0 and len(rows) <= WIDE_SLOTS_MAX
        ends = [row.offset + width for row in rows]
        return able and is_read_in_place(ends, [width] * len(rows), most=most)

    def _learn(self, runs: Sequence[Run], guesses: dict[RowId, Guess]) -> None:
        for run in runs:
            self.counts.drafted_tokens += run.drafted
            self.counts.accepted_tokens += run.accepted
            guess = guesses.get(run.row.id)
            if guess is None:
                continue
            drawn = [result.token_id for result in run.drawn]
            self._guessers[run.row.id].record.note(
                guess.agreed,
                judged=min(len(drawn), len(guess.tokens)),
                right=count_agreed(guess.tokens, drawn),
            )


def _before_end(row: Row, guess: Guess) -> Guess | None:
    """Return the guess up to the first token that would end the stream: nothing follows that."""
    ends = row.ends
    depth = next((i for i, token_id in enumerate(guess.tokens) if token_id in ends), None)
    if depth is None:
        return guess
    return guess.cut(depth) if depth else None


def _cut(guesses: dict[RowId, Guess], depth: int) -> dict[RowId, tuple[int, ...]]:
    """Return what is run of the guesses: `depth` a row, as far as the step's bound goes."""
    left = DRAFTED_TOKENS_MAX
    cut: dict[RowId, tuple[int, ...]] = {}
    for row_id, guess in guesses.items():
        tokens = guess.tokens[: min(depth, left)]
        if tokens:
            cut[row_id] = tokens
        left -= len(tokens)
    return cut
