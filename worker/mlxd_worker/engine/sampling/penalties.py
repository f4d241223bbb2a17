"""Penalties on recent tokens: which ones count, and what they do to the logits.

Invariants:
- A row's penalties depend on its own prompt and output alone; the window slides one token a draw.
- A logit is first divided (or, below zero, multiplied) by the repetition penalty, then lowered by
  the presence penalty once and by the frequency penalty for every occurrence in the window.
- A row without penalties keeps its logits bit for bit, whatever its neighbours ask for.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import mlx.core as mx

from mlxd_shared.domain.requests import Sampling


class RecentTokens:
    """The tokens of one stream that penalties look at: its last `window`, or all with -1.

    Takes nothing and stays empty where `sampling` penalises nothing.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        """Start with the prompt's last tokens."""
        window = sampling.repeat_last_n if sampling.penalises else 0
        self._window: deque[int] = deque(maxlen=None if window < 0 else window)
        self._counts: Counter[int] = Counter()
        last = prompt if window < 0 else prompt[len(prompt) - min(window, len(prompt)) :]
        _slide(self._window, self._counts, last)

    @property
    def counts(self) -> Mapping[int, int]:
        """How often each token occurs in the window; valid until the next `push`."""
        return self._counts

    def push(self, token_id: int) -> None:
        """Let the window slide over one more token."""
        if self._window.maxlen != 0:
            _slide(self._window, self._counts, (token_id,))

    def ahead(self, token_ids: Sequence[int]) -> list[Mapping[int, int]]:
        """Return what `counts` would be after each of `token_ids`, of which none is taken."""
        window, counts = self._window.copy(), self._counts.copy()
        counts_ahead: list[Mapping[int, int]] = []
        for token_id in token_ids:
            _slide(window, counts, (token_id,))
            counts_ahead.append(counts.copy())
        return counts_ahead


def _slide(window: deque[int], counts: Counter[int], token_ids: Iterable[int]) -> None:
    """Let `window`, whose tokens are counted in `counts`, slide over `token_ids`."""
    if window.maxlen == 0:
        return
    for token_id in token_ids:
        if len(window) == window.maxlen:
            oldest = window[0]
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]
        window.append(token_id)
        counts[token_id] += 1


def penalise(logits: mx.array, rows: Sequence[tuple[Sampling, Mapping[int, int]]]) -> mx.array:
    """Return logits [N, V] with every row's penalties applied, lazy.

    rows: each row's options and how often its recent tokens occur. The result is the input itself
    where no row penalises anything.
    """
    asking = [
        (row, options, recent)
        for row, (options, recent) in enumerate(rows)
        if recent and options.penalises  # in this order: most have none to look at
    ]
    if not asking:
        return logits
    # A window may hold all of a long context: nothing is made for a single token of it here.
    ids = mx.array([*chain.from_iterable(recent for _, _, recent in asking)], dtype=mx.uint32)
    counts = mx.array(
        [*chain.from_iterable(recent.values() for _, _, recent in asking)], dtype=mx.float32
    )
    options_of = mx.concatenate(
        [mx.full((len(recent),), index) for index, (_, _, recent) in enumerate(asking)]
    )
    table = mx.array([(row, *_strengths(options)) for row, options, _ in asking], dtype=mx.float32)
    row_of, factor, presence, frequency = (table[:, column][options_of] for column in range(4))
    at = (row_of.astype(mx.uint32), ids)
    old = logits[at]
    new = mx.where(old > 0, old / factor, old * factor) - (presence + frequency * counts)
    result = logits[:]  # an object of its own: the caller's keeps its values
    result[at] = new
    return result


def _strengths(options: Sampling) -> tuple[float, float, float]:
    return options.repetition_penalty, options.presence_penalty, options.frequency_penalty
