"""What is measured, and its figures: prompts of a length, side by side in so many rows. Pure.

Invariants:
- Figures are those of `mlxd_shared.ops.measuring`, by which `make bench` measures too: medians over
  runs, the first of which warms up and counts for nothing.
- Every run has prompts of its own, the same for all ways: nothing is found in a prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.measuring import Outcome, measures, medians, prefill_tokens_per_s

SETTLING_TOKENS: Final = 16
"""Of a short stream before each run: whoever computed before leaves cold caches."""
LENGTHS_MAX: Final = 16
"""Of prompts, and of rows, that one command measures."""
TOKENS_MIN: Final = 2
"""Below that there is no decoding to time."""
SHOWN: Final = (
    "prefill_tokens_per_s",
    "ttft_p50_s",
    "decode_tokens_per_s",
    "itl_p50_s",
    "itl_p99_s",
    "tokens_per_s",
)

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One size of work."""

    prompt_tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a command measures, in each way."""

    cells: tuple[Cell, ...]
    new_tokens: int
    runs: int

    @property
    def rows(self) -> int:
        """The most rows side by side."""
        return max(cell.rows for cell in self.cells)

    @property
    def context(self) -> int:
        """The tokens of the longest stream."""
        longest = max(cell.prompt_tokens for cell in self.cells)
        return longest + max(self.new_tokens, SETTLING_TOKENS)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one cell. `peak_nbytes`: the most memory that MLX held; 0 if unknown."""

    outcomes: tuple[Outcome, ...]
    peak_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians of one cell in one way."""

    way: str
    prompt_tokens: int
    rows: int
    runs: int
    peak_nbytes: int
    values: dict[str, float]


def plan_of(prompts: str, rows: str, *, new_tokens: int, runs: int) -> Plan:
    """Return what is to be measured: every length of prompts in every number of rows.

    prompts, rows: whole numbers with commas between.

    Raises:
        InvalidRequest: one is none, or out of range.
    """
    lengths = _numbers("prompt", prompts, most=config.CONTEXT_LENGTH_LIMIT)
    counts = _numbers("rows", rows, most=config.ROWS_MAX_LIMIT)
    if not TOKENS_MIN <= new_tokens <= config.CONTEXT_LENGTH_LIMIT:
        limit = f"{TOKENS_MIN} to {config.CONTEXT_LENGTH_LIMIT}"
        raise InvalidRequest.of("tokens", f"{new_tokens} is not within {limit}")
    if runs < 1:
        raise InvalidRequest.of("runs", f"{runs} is less than 1")
    cells = tuple(Cell(length, count) for length in lengths for count in counts)
    return Plan(cells, new_tokens, runs)


def prompts_of(plan: Plan, cell: Cell, vocab_size: int) -> Iterator[Prompts]:
    """Return the prompts of each run of a cell, the one that warms up first."""
    draws = random.Random(f"{cell.prompt_tokens} {cell.rows}")  # noqa: S311 - no secret
    for _ in range(plan.runs + 1):
        yield [
            [draws.randrange(1, vocab_size) for _ in range(cell.prompt_tokens)]
            for _ in range(cell.rows)
        ]


def figure_of(way: str, cell: Cell, runs: Sequence[Ran]) -> Figure:
    """Return the medians of a cell's runs, the first of which is left out."""
    timed = runs[1:]
    values = medians([
        {
            **measures(run.outcomes),
            "prefill_tokens_per_s": prefill_tokens_per_s(run.outcomes, cell.prompt_tokens),
        }
        for run in timed
    ])  # fmt: skip
    peak_nbytes = max(run.peak_nbytes for run in timed)
    shown: dict[str, float] = {name: values[name] for name in SHOWN if name in values}
    return Figure(way, cell.prompt_tokens, cell.rows, len(timed), peak_nbytes, shown)


def _numbers(field: str, text: str, *, most: int) -> list[int]:
    """Read whole numbers from 1 to `most`; raises InvalidRequest."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) if word.isascii() and word.isdecimal() else 0 for word in words]
    if not all(1 <= number <= most for number in numbers) or len(words) > LENGTHS_MAX:
        problem = f"{text!r:.80} is not 1 to {LENGTHS_MAX} numbers from 1 to {most}, such as 1,8"
        raise InvalidRequest.of(field, problem)
    return list(dict.fromkeys(numbers))
