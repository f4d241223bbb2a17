"""The loads that are put on both servers, and what is promised of each.

Sizes are chosen so that all cases with five runs take about half an hour on two cores; each says
where it is smaller than what it stands for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxd_controller.bench.requests import Request
from tests.bench.azure import trace_requests
from tests.bench.prompts import Prompts

CLIENTS = 32
CONTEXT = 4608
"""Holds the longest case: 4096 tokens and what follows."""
LOAD_FRACTION = 0.7
"""Of the rate that mlx-lm sustains with every client busy."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the ratio of a measure, ours to mlx-lm's, is to be."""

    measure: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, ratio: float) -> bool:
        """Tell whether a ratio is good enough."""
        enough = self.at_least is None or ratio >= self.at_least
        return enough and (self.at_most is None or ratio <= self.at_most)

    def __str__(self) -> str:
        """Say it in a table."""
        return f">= {self.at_least}" if self.at_most is None else f"<= {self.at_most}"


Make = Callable[[Prompts, random.Random], list[Request]]


@dataclass(frozen=True, slots=True)
class Case:
    """One load; `make` gives its requests anew for every run."""

    key: str
    title: str
    make: Make
    targets: tuple[Target, ...] = ()
    open_loop: bool = False
    """Its requests arrive by themselves, at `LOAD_FRACTION` of what mlx-lm sustains."""
    shipped_blas: bool = False
    """mlx-lm runs with the BLAS that its wheel brings."""
    runs_max: int | None = None


def make_closed(count: int, prompt_tokens: int, new_tokens: int, *, seeded: bool = False) -> Make:
    """Return requests of one size that wait for a free client."""

    def make(prompts: Prompts, draws: random.Random) -> list[Request]:
        return [
            Request(
                text=prompts.make(prompt_tokens),
                prompt_tokens=prompt_tokens,
                max_tokens=new_tokens,
                seed=draws.randrange(1, 1 << 31) if seeded else None,
                temperature=1.0 if seeded else 0.0,
            )
            for _ in range(count)
        ]

    return make


def poisson(count: int, prompt_tokens: int, new_tokens: int) -> Make:
    """Return requests that arrive at random, one a second on average: to be scaled."""

    def make(prompts: Prompts, draws: random.Random) -> list[Request]:
        at_s, requests = 0.0, []
        for _ in range(count):
            at_s += draws.expovariate(1.0)
            text = prompts.make(prompt_tokens)
            requests.append(Request(text, prompt_tokens, new_tokens, at_s=at_s))
        return requests

    return make


def make_mixed(prompts: Prompts, _: random.Random) -> list[Request]:
    """Return one long prompt, and fifteen short ones that follow its first token.

    So all of them decode side by side for a while, however either server reads prompts.
    """
    long_tokens, short_tokens = 4096, 64
    long = Request(prompts.make(long_tokens), long_tokens, 160)
    return [long] + [
        Request(prompts.make(short_tokens), short_tokens, 96, after=0) for _ in range(15)
    ]


CASES: Sequence[Case] = (
    Case(
        "a",
        "closed loop of 32, 128 in, 256 out",
        make_closed(64, 128, 256),
        (Target("tokens_per_s", at_least=1.3), Target("itl_p99_s", at_most=0.25)),
    ),
    Case(
        "b",
        "closed loop of 32, 1024 in, 32 out",
        make_closed(32, 1024, 32),
        (Target("tokens_per_s", at_least=1.0),),
    ),
    Case(
        "c",
        "Poisson arrivals at 70 % of mlx-lm's saturation, 128 in, 128 out",
        poisson(48, 128, 128),
        (
            Target("ttft_p50_s", at_most=0.6),
            Target("ttft_p99_s", at_most=0.6),
            Target("itl_p99_s", at_most=0.25),
        ),
        open_loop=True,
    ),
    Case(
        "d",
        "burst of 32, 128 in, 32 out",
        make_closed(32, 128, 32),
        (Target("ttft_p50_s", at_most=0.9),),
    ),
    Case(
        "e",
        "one row of 4096 beside fifteen of 64",
        make_mixed,
        (Target("decode_tokens_per_s", at_least=4.0),),
    ),
    Case(
        "f",
        "closed loop of 32 with seeds, 128 in, 64 out",
        make_closed(32, 128, 64, seeded=True),
        (Target("tokens_per_s", at_least=3.0),),
    ),
    Case(
        "g",
        "as (a) against mlx-lm with the BLAS it brings; 32 requests of 64 out, one run",
        make_closed(32, 128, 64),
        (Target("tokens_per_s", at_least=15.0),),
        shipped_blas=True,
        runs_max=1,
    ),
    Case(
        "trace",
        "Azure's conversations at 70 % of mlx-lm's saturation, lengths a quarter",
        trace_requests,
        open_loop=True,
        runs_max=3,
    ),
)
