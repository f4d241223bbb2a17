"""What is timed of streams, wherever they are timed: from the outcomes of one run to its figures.

Inter-token time: tokens that come in one message share its time, so a message of n tokens counts
its gap to the message before once, and n - 1 zeros. What a reader waits for is the next message:
these gaps are counted by themselves.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

Measures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stream as its client saw it; times in seconds on the generator's clock."""

    sent_s: float
    stamps_s: tuple[float, ...]
    """When each message with tokens came."""
    counts: tuple[int, ...]
    """How many tokens each of them brought."""
    text: str

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(self.counts)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps_s[0] - self.sent_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.stamps_s[-1] - self.stamps_s[0]

    def gaps_s(self) -> list[float]:
        """Return the times between tokens, one fewer than tokens."""
        gaps = [0.0] * (self.counts[0] - 1)
        for before_s, now_s, count in zip(
            self.stamps_s, self.stamps_s[1:], self.counts[1:], strict=False
        ):
            gaps += [now_s - before_s, *([0.0] * (count - 1))]
        return gaps

    def message_gaps_s(self) -> list[float]:
        """Return the times between messages, one fewer than messages."""
        return [after - before for before, after in pairwise(self.stamps_s)]


def measures(outcomes: Sequence[Outcome]) -> Measures:
    """Return the figures of one run, tokens being those generated.

    decode_tokens_per_s looks at the time in which every stream decodes, where there is one: from
    the last first token to the first last one.
    """
    began_s = min(outcome.sent_s for outcome in outcomes)
    took_s = max(outcome.stamps_s[-1] for outcome in outcomes) - began_s
    gaps_s = sorted(gap for outcome in outcomes for gap in outcome.gaps_s())
    waits_s = sorted(outcome.ttft_s for outcome in outcomes)
    figures = {
        "took_s": took_s,
        "tokens_per_s": sum(outcome.tokens for outcome in outcomes) / took_s,
        "requests_per_s": len(outcomes) / took_s,
        "ttft_p50_s": percentile(waits_s, 50),
        "ttft_p99_s": percentile(waits_s, 99),
        "itl_p50_s": percentile(gaps_s, 50),
        "itl_p99_s": percentile(gaps_s, 99),
        "itl_max_s": gaps_s[-1],
        "tokens_per_message": sum(o.tokens for o in outcomes)
        / sum(len(o.stamps_s) for o in outcomes),
    }
    messages_s = sorted(gap for outcome in outcomes for gap in outcome.message_gaps_s())
    if messages_s:
        figures["message_gap_p50_s"] = percentile(messages_s, 50)
        figures["message_gap_p99_s"] = percentile(messages_s, 99)
    from_s = max(outcome.stamps_s[0] for outcome in outcomes)
    until_s = min(outcome.stamps_s[-1] for outcome in outcomes)
    if until_s > from_s:
        decoded = sum(
            count
            for outcome in outcomes
            for at_s, count in zip(outcome.stamps_s, outcome.counts, strict=True)
            if from_s < at_s <= until_s
        )
        figures["decode_tokens_per_s"] = decoded / (until_s - from_s)
    return figures


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest of the ordered values that `percent` of them do not exceed."""
    assert ordered, "there is something to rank"
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def medians(runs: Sequence[Measures]) -> dict[str, float]:
    """Return each measure's median over the runs that have it all."""
    shared = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: statistics.median(run[name] for run in runs) for name in shared}


def prefill_tokens_per_s(outcomes: Sequence[Outcome], prompt_tokens: int) -> float:
    """Return how many prompt tokens a second were read, from the first request to the last's token.

    prompt_tokens: of each of them.
    """
    began_s = min(outcome.sent_s for outcome in outcomes)
    read_s = max(outcome.stamps_s[0] for outcome in outcomes) - began_s
    return prompt_tokens * len(outcomes) / read_s


def outcomes_to_json(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as one line."""
    return json.dumps([asdict(outcome) for outcome in outcomes])


def outcomes_from_json(line: bytes) -> list[Outcome]:
    """Return what `outcomes_to_json` wrote."""
    return [outcome_of(values) for values in json.loads(line)]


def outcome_of(values: Mapping[str, Any]) -> Outcome:
    """Return an outcome whose fields came as JSON."""
    lists = {name: tuple(values[name]) for name in ("stamps_s", "counts")}
    return Outcome(**{**values, **lists})
