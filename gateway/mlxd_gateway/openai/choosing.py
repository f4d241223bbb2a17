"""The best of several completions: more are made than are answered. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlxd import Completion


def choose(
    completions: Sequence[Completion], *, made: int, kept: int, shows_logprobs: bool
) -> list[Completion]:
    """Return the `kept` best of each `made` completions, best first, prompt by prompt.

    The best has the highest log-probability by token; one without tokens is the last. Equal ones
    keep their order. Where nobody asked for log-probabilities, they are left out.
    """
    best: list[Completion] = []
    for begin in range(0, len(completions), made):
        group = completions[begin : begin + made]
        best += sorted(group, key=_mean_logprob, reverse=True)[:kept]
    return best if shows_logprobs else [replace(each, logprobs=()) for each in best]


def _mean_logprob(done: Completion) -> float:
    logprobs = [each.chosen.logprob for each in done.logprobs]
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf
