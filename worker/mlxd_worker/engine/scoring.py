"""The log-probabilities of a prompt's own tokens, gathered while its chunks are evaluated.

Invariants:
- A token's are of the logits behind the token before it, as those of a drawn token are.
- Logits are made for a few positions at a time: for all of a chunk they would take more memory than
  its pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from mlxd_worker.engine.request import PositionLogprobs
from mlxd_worker.engine.sampling.logprobs import logprobs_of

POSITIONS_AT_ONCE: Final = 16


class Scores:
    """One prompt's. One owner: the engine thread."""

    def __init__(self, prompt: Sequence[int], *, begin: int, count: int) -> None:
        """Score the tokens from index `begin` on, each with the `count` best ones."""
        assert begin > 0, "nothing stands before the first token"
        self.reusable = begin - 1
        """So many of the prompt's tokens may come from a former one: nobody needs their logits."""
        self._prompt = prompt
        self._begin = begin
        self._count = count
        self._entries: list[PositionLogprobs] = []

    def take_states(
        self, hidden: mx.array, offset: int, logits_of: Callable[[mx.array], mx.array]
    ) -> None:
        """Take the hidden rows [tokens, hidden] of the chunk that begins at `offset`, evaluated."""
        first = max(self._begin - 1 - offset, 0)
        for start in range(first, hidden.shape[0], POSITIONS_AT_ONCE):
            end = min(start + POSITIONS_AT_ONCE, hidden.shape[0])
            tokens = list(self._prompt[offset + start + 1 : offset + end + 1])
            logits = logits_of(hidden[start : start + len(tokens)])
            targets = mx.array(tokens, dtype=mx.int32)
            scored = logprobs_of(logits, targets, [self._count for _ in tokens])
            assert scored is not None, "every row asks"
            mx.eval(scored.arrays())
            values = scored.to_values(tokens)
            self._entries += [values[row] for row in range(len(tokens))]

    @property
    def entries(self) -> tuple[PositionLogprobs, ...]:
        """Those of all tokens from `begin` on that have been read."""
        return tuple(self._entries)
