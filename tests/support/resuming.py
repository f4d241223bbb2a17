"""A stream that was cut and is resumed, compared with the whole one that nobody cut.

Invariants:
- What was told before the cut and what the resumed stream tells are the whole stream together: ids,
  text, the end, and log-probabilities up to rounding. The prompt is counted once, the output whole.
- They may differ from a near tie on alone, which the resumed stream must then have counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxd_worker.engine.request import Failed, Finished
from tests.support.engines import Collected
from tests.support.near_ties import NEAR_TIE


@dataclass(slots=True)
class Tally:
    """What has been compared."""

    cuts: int = 0
    tokens: int = 0
    """Generated after a cut."""
    guessed: int = 0
    reused: int = 0
    near_ties: int = 0
    """Draws that were told to be too near to call."""
    diverged: int = 0
    """Streams that went on otherwise, from a near tie on."""

    def __str__(self) -> str:
        return (
            f"{self.cuts} cuts, {self.tokens} tokens behind them, "
            f"{self.guessed} guessed, {self.reused} prompt tokens reused: {self.near_ties} near "
            f"ties, {self.diverged} streams diverged"
        )


def cuts_of(whole: Collected) -> range:
    """Return after how many of its tokens the stream can have been cut: it went on from there."""
    last = whole.events[-1]
    over = isinstance(last, Finished) and bool(last.ids)
    return range(1, len(whole.ids) + (not over))


def resumed_prompt(
    prompt: Sequence[int], whole: Collected, cut: int, *, by_steps: bool = False
) -> dict[str, Any]:
    """Return the arguments of a stream that goes on where `whole` was cut."""
    if by_steps:
        return {"prompt": prompt, "forced": tuple(whole.ids[:cut])}
    return {"prompt": (*prompt, *whole.ids[:cut]), "resumed": cut}


def compare_resumed(whole: Collected, rest: Collected, *, cut: int, tally: Tally) -> None:
    """Assert that `rest` is what follows in `whole`, or differs behind a near tie it has told."""
    events = [event for event in whole.events if not isinstance(event, Failed)]
    said = "".join(event.text for event in events if event.offset < cut)
    last = rest.events[-1]
    tally.cuts += 1
    tally.tokens += len(rest.ids)
    tally.guessed += rest.guessed
    tally.reused += rest.reused
    if isinstance(last, Finished):
        tally.near_ties += last.usage.near_ties
    if rest.drawn != whole.drawn[cut:]:
        assert isinstance(last, Finished), last
        assert last.usage.near_ties, (cut, whole.drawn[cut:], rest.drawn)
        tally.diverged += 1
        return
    offsets = [event.offset for event in rest.events if not isinstance(event, Failed)]
    assert offsets[:1] == [cut][: len(offsets)]
    assert (said + rest.text, rest.outcome) == (whole.text, whole.outcome)
    _check_same_logprobs(whole, rest, cut)
    if isinstance(last, Finished):
        usage, other = last.usage, whole.finished.usage
        assert usage.prompt_tokens == other.prompt_tokens
        assert usage.completion_tokens == other.completion_tokens
        assert usage.cached_tokens <= usage.prompt_tokens


def _check_same_logprobs(whole: Collected, rest: Collected, cut: int) -> None:
    for one, other in zip(whole.logprobs[cut:], rest.logprobs, strict=True):
        assert one.chosen.token_id == other.chosen.token_id
        assert abs(one.chosen.logprob - other.chosen.logprob) < NEAR_TIE
        for best, same in zip(one.top, other.top, strict=True):
            assert abs(best.logprob - same.logprob) < NEAR_TIE
