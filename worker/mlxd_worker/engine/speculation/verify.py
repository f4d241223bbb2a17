"""The pass that judges guesses: several tokens of every row at once, and what is drawn after each.

Why the output is plain decoding's, whatever was guessed:
- A row evaluates its next token and its guesses d1 .. dk. After each of these a token is drawn just
  as plain decoding draws it: from the logits there, under the same options, with penalties that
  count the guesses before, and with the noise of (seed, position). So t(i) is what plain decoding
  draws where d1 .. d(i-1) are its output. They are as long as each equals its t; the first t that
  differs from its guess still stands, and what was drawn after that guess is dropped.
- As rejection sampling: a guess is fixed before the noise of its position is looked at, so the
  proposal is a single point. The largest of log q + Gumbel noise is a draw from q, hence the guess
  d is accepted with probability q(d), and where it is not, the token is a draw from q without d,
  renormalised. That is the rule that leaves q unchanged; and more: it is the very token that plain
  decoding draws with this seed, so guesses need no draws of their own (`Purpose.DRAFT`, `ACCEPT`),
  and a stream may change between guessing and not at any token.
- What differs is rounding alone: a wider pass multiplies more rows at once.

Invariants:
- All rows have the step's width. Beyond a row's own tokens its last one is repeated: it is written
  where nothing of the row's stands yet, is seen by none of its tokens, and is cut back with what
  was not accepted (`settle`). So a pass needs caches that go back (`RowContents.takes_back`).
- One sync with the host, for all draws together; nothing of a pass outlives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.sampling.drawing import draw_all
from mlxd_worker.engine.stepping.base import Run
from mlxd_worker.models.base import Batch, Passes, shift_all

Guesses = Mapping[RowId, Sequence[int]]
"""What rows guess in a step; a row without an entry guesses nothing."""


def decode_wide(
    model: Passes, caches: RowCaches, rows: Sequence[Row], guesses: Guesses, *, width: int
) -> list[Run]:
    """Evaluate each row's next token and its guesses; return the rows' runs, in the rows' order.

    Each row has reserved `width` tokens, may be cut back from them, and guesses fewer. The rows'
    offsets are left as they were: the caller that judges the runs calls `settle`.
    """
    runs = [(row.next_token(), *guesses.get(row.id, ())) for row in rows]
    logits = model.logits(_hidden_rows(model, caches, rows, runs, width))
    draws = [draw for row, run in zip(rows, runs, strict=True) for draw in row.draws(run[1:])]
    # None of a row that guesses: what must report log-probabilities never does.
    logprobs_counts = [
        row.request.top_logprobs for row, run in zip(rows, runs, strict=True) for _ in run
    ]
    drawn = draw_all(logits, draws, logprobs_counts, along=caches.state())
    done_runs, first = [], 0
    for row, run in zip(rows, runs, strict=True):
        count = 1 + count_agreed(
            run[1:], [result.token_id for result in drawn[first : first + len(run)]]
        )
        kept = tuple(drawn[first : first + count])
        done_runs.append(Run(row, kept, row.offset, drafted=len(run) - 1))
        first += len(run)
    return done_runs


def count_agreed(guesses: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many guesses, from the first on, are what was drawn."""
    count = 0
    while count < min(len(guesses), len(drawn)) and guesses[count] == drawn[count]:
        count += 1
    return count


def _hidden_rows(
    model: Passes,
    caches: RowCaches,
    rows: Sequence[Row],
    runs: Sequence[Sequence[int]],
    width: int,
) -> mx.array:
    """Return the hidden rows after each token of each run, one run after another, lazy."""
    padded = [(*run, *[run[-1]] * (width - len(run))) for run in runs]
    offsets = [row.offset for row in rows]
    batch = Batch(
        tokens=mx.array(padded, dtype=mx.int32),
        offsets=mx.array(offsets, dtype=mx.int32),
        lengths=tuple(offset + width for offset in offsets),
        rows=tuple(row.id for row in rows),
        turns=shift_all(offsets, [row.shift for row in rows]),
    )
    hidden = model.forward(batch, caches)
    if all(len(run) == width for run in runs):
        return hidden
    own = [index * width + step for index, run in enumerate(runs) for step in range(len(run))]
    return hidden[mx.array(own, dtype=mx.uint32)]
