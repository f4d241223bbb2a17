"""What the step loop knows of steps: one that draws tokens, what it takes and what it gives.

Invariants:
- The loop and its prompt reader know no stepper but by this Protocol; which one there
  is was chosen when the model was loaded (`choose`).
- Of what a step has drawn nothing stands until the loop has judged it and called `settle`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampling.drawing import Drawn


@dataclass(frozen=True, slots=True)
class Carried:
    """A prompt's next tokens, which a step's pass takes along; reserved, unless rows never move."""

    row: Row
    tokens: tuple[int, ...]
    """Without the prompt's last one."""

    @property
    def draws(self) -> bool:
        """Whether the prompt ends with these: then its first token is drawn in the same pass."""
        return len(self.tokens) == self.row.prefill_left

    @property
    def evaluated(self) -> tuple[int, ...]:
        """What the pass evaluates: the prompt's last token, too, where it draws."""
        return (*self.tokens, self.row.next_token()) if self.draws else self.tokens


@dataclass(frozen=True, slots=True)
class Run:
    """What a step has drawn for one row, to be judged one by one; `settle` says how many were."""

    row: Row
    drawn: tuple[Drawn, ...]
    """At least one: the guesses that were right, then one more."""
    start: int
    """Where the row stood before the step."""
    drafted: int = 0
    """How many guesses were judged."""

    @property
    def accepted(self) -> int:
        """How many of the guesses were right."""
        return len(self.drawn) - 1


class Stepper(Protocol):
    """Draws the next tokens of the rows of one engine. One owner: the engine thread."""

    @property
    def joins(self) -> bool:
        """Whether a step takes a few of prompts' tokens along, and waits for them."""

    @property
    def carries(self) -> bool:
        """Whether the step that is made up ahead takes whole chunks of prompts along, in place."""

    @property
    def guesses(self) -> bool:
        """Whether rows that ask for it may have more than one token of a step."""

    @property
    def ahead(self) -> bool:
        """Whether a step is under way whose tokens are not read yet."""

    def step(
        self, rows: Sequence[Row], *, ahead: bool = False, carried: Sequence[Carried] = ()
    ) -> list[Run]:
        """Reserve and evaluate each row's next token; return what was drawn, a run a row.

        The runs are in an order of their own; `carried` rows that draw have runs, too, but for
        those whose prompts were evaluated apart or draw with the step ahead. ahead: whether the
        same rows will step next, as far as is known, and those that join them. carried: empty
        unless it `joins` or `carries`.
        """

    def rest(self) -> None:
        """Wait for what is under way: then nothing but the caches refers to their arrays."""

    def drop(self) -> None:
        """Forget what is under way: its rows take nothing of it up."""


def runs_of(rows: Iterable[Row], drawn: Iterable[Drawn]) -> list[Run]:
    """Return the runs of rows that have just gone on by the one token drawn for each."""
    return [Run(row, (one,), row.offset - 1) for row, one in zip(rows, drawn, strict=True)]


def settle(caches: RowCaches, run: Run, *, judged: int) -> None:
    """Bring the run's row to where plain decoding stands once `judged` of its tokens were judged.

    That is one token further for each: the last one judged is never evaluated.
    """
    run.row.offset = run.start + judged
    caches.contents.cut_back(run.row.id, run.row.offset)
