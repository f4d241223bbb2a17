"""What the eviction replay runs on: real arrivals, drawn to models of drawn sizes.

A request's session is the second block of its prompt (the first is often a system prompt of all),
or the first where there is one only; a session's model is drawn once, with Zipf weights. Service is
as long as the trace's prompt and answer take at the rates below, however many run at once, so that
five to six requests are in service on average.
"""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import dataclass
from pathlib import Path

MODELS = 12
SIZES = (1, 2, 4, 8, 16)
ALPHAS = (0.6, 1.0, 1.5)
SEEDS = (1, 2, 3, 4, 5)
RELOAD_BASE_S = 2
PREFILL_TOKENS_PER_S = 40_000.0
DECODE_TOKENS_PER_S = 250.0
"""One row of an 8 B model on one H200, as measured (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace, before it has a model."""

    at_s: float
    session: int
    prefill_s: float
    service_s: float
    """Prefill included."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request for one model."""

    at_s: float
    model: int
    prefill_s: float
    service_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: the sizes of the models, what fits at once, the requests in order."""

    alpha: float
    seed: int
    sizes: tuple[int, ...]
    capacity: int
    requests: tuple[Request, ...]

    def reload_s(self, model: int) -> float:
        """Return how long a load takes."""
        return float(RELOAD_BASE_S + self.sizes[model])


def read_arrivals(path: Path) -> list[Arrival]:
    """Return the trace's requests in order."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    arrivals: list[Arrival] = []
    for record in records:
        blocks = record["hash_ids"]
        prefill_s = record["input_length"] / PREFILL_TOKENS_PER_S
        service_s = prefill_s + record["output_length"] / DECODE_TOKENS_PER_S
        session = blocks[1] if len(blocks) > 1 else blocks[0]
        arrivals.append(Arrival(record["timestamp"] / 1000, session, prefill_s, service_s))
    return arrivals


def make_cell(arrivals: list[Arrival], *, alpha: float, seed: int) -> Cell:
    """Draw sizes, then each session's model in the order of first arrival.

    Capacity is a third of all sizes, rounded down, but never less than the largest model.
    """
    draws = random.Random(seed)
    weights = [1 / (rank + 1) ** alpha for rank in range(MODELS)]
    sizes = tuple(draws.choice(SIZES) for _ in range(MODELS))
    drawn: dict[int, int] = {}
    requests: list[Request] = []
    for arrival in arrivals:
        if arrival.session not in drawn:
            drawn[arrival.session] = draws.choices(range(MODELS), weights)[0]
        model = drawn[arrival.session]
        requests.append(Request(arrival.at_s, model, arrival.prefill_s, arrival.service_s))
    capacity = max(sum(sizes) // 3, *sizes)
    return Cell(alpha, seed, sizes, capacity, tuple(requests))
