"""From the outcomes of one run to its figures, and from runs to ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.bench.requests import Outcome

Measures = Mapping[str, float]


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
