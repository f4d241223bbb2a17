"""What the benchmark of servers under load counts, and how its generator sends."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from mlxd_controller.bench.load import run
from mlxd_controller.bench.requests import Job, Request, job_from_json, job_to_json
from mlxd_shared.ops.measuring import (
    Outcome,
    measures,
    medians,
    outcomes_from_json,
    outcomes_to_json,
    percentile,
)
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.bench.azure import NEW_TOKENS, PROMPT_TOKENS, SHRINK, trace_requests
from tests.bench.cases import CASES, Target
from tests.bench.load import HTTP
from tests.bench.prompts import Prompts
from tests.bench.server import DEMO, chosen_cases
from tests.bench.sides import our_side


def test_tokens_of_one_message_share_its_time() -> None:
    """A message of n tokens counts its gap once, and n - 1 zeros."""
    outcome = Outcome(1.0, (1.5, 2.0, 4.0), (1, 3, 2), "")

    assert outcome.ttft_s == 0.5
    assert outcome.tokens == 6
    assert outcome.gaps_s() == [0.5, 0.0, 0.0, 2.0, 0.0]
    assert outcome.message_gaps_s() == [0.5, 2.0]
    figures = measures([outcome, Outcome(0.0, (3.0,), (4,), "")])
    assert (figures["message_gap_p50_s"], figures["message_gap_p99_s"]) == (0.5, 2.0)


def test_streams_of_one_message_each_have_no_gap_between_any() -> None:
    """What was not seen is left out."""
    figures = measures([Outcome(0.0, (1.0,), (4,), "")])

    assert "message_gap_p50_s" not in figures
    assert figures["itl_p99_s"] == 0.0


def test_percentiles_are_values_that_were_seen() -> None:
    """A percentile is the smallest value that so many do not exceed."""
    ordered = [float(value) for value in range(1, 101)]

    assert percentile(ordered, 50) == 50.0
    assert percentile(ordered, 99) == 99.0
    assert percentile([3.0], 99) == 3.0


def test_decode_rate_counts_the_time_in_which_all_streams_decode() -> None:
    """Tokens after the last first token, up to the first last one, over that time."""
    outcomes = [
        Outcome(0.0, (1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1), ""),
        Outcome(0.0, (2.0, 3.0, 4.0, 9.0), (1, 1, 2, 1), ""),
    ]

    figures = measures(outcomes)

    assert figures["decode_tokens_per_s"] == 5 / 2
    assert figures["tokens_per_s"] == 9 / 9
    assert medians([figures, figures]) == figures


def test_a_target_judges_a_ratio() -> None:
    """A ratio is held against the bound that the case names."""
    assert Target("x", at_least=1.3).is_met(1.3)
    assert not Target("x", at_least=1.3).is_met(1.29)
    assert not Target("x", at_most=0.25).is_met(0.26)


def test_what_crosses_to_the_generator_comes_back() -> None:
    """Jobs and outcomes survive the pipe."""
    request = Request("once", 2, 3, at_s=0.5, after=0, seed=7, temperature=1.0, ids=(5, 6))
    job = Job(HTTP, "127.0.0.1:1", "m", (request,), (request, request), clients=2)
    outcomes = [Outcome(0.0, (1.0,), (1,), "x")]

    assert job_from_json(job_to_json(job)) == job
    assert outcomes_from_json(outcomes_to_json(outcomes).encode()) == outcomes


def test_prompts_have_exactly_the_length_asked_for() -> None:
    """A text of n tokens is n tokens to the model's own tokenizer, and none is made twice."""
    tokenizer, prompts = load_tokenizer(DEMO), Prompts(DEMO, seed=1)
    texts = [prompts.make(tokens) for tokens in (2, 64, 64, 1024)]

    assert [len(tokenizer.encode(text)) for text in texts] == [2, 64, 64, 1024]
    assert len(set(texts)) == 4


def test_cases_are_chosen_by_letter() -> None:
    """An unknown letter is refused, none chooses none."""
    assert [case.key for case in chosen_cases("a,e")] == ["a", "e"]
    assert chosen_cases("none") == []
    with pytest.raises(ValueError, match="no case 'z'"):
        chosen_cases("z")


def test_the_real_trace_keeps_its_pattern() -> None:
    """Arrivals are in order, once a second on average; lengths are a quarter of the trace's."""
    requests = trace_requests(Prompts(DEMO, seed=1), random.Random(1))
    at_s = [request.at_s or 0.0 for request in requests]

    assert all(before <= after for before, after in pairwise(at_s))
    assert at_s[-1] == pytest.approx(len(requests))
    assert SHRINK == 4
    assert all(request.prompt_tokens in PROMPT_TOKENS for request in requests)
    assert all(request.max_tokens in NEW_TOKENS for request in requests)


@pytest.mark.asyncio
async def test_the_generator_reads_every_stream_to_its_end() -> None:
    """Closed, timed and following requests all come back, in their order and of their lengths."""
    prompts = Prompts(DEMO, seed=2)
    requests = (
        Request(prompts.make(8), 8, 6),
        Request(prompts.make(9), 9, 3, after=0),
        Request(prompts.make(10), 10, 4, at_s=0.01),
        Request(prompts.make(11), 11, 5, seed=3, temperature=1.0),
    )
    async with our_side(DEMO, rows_max=4, context=128) as side:
        job = Job(side.kind, side.target, side.model, requests[:1], requests, clients=2)
        outcomes = await asyncio.wait_for(run(job), 30)

    assert [outcome.tokens for outcome in outcomes] == [6, 3, 4, 5]
    assert outcomes[1].sent_s >= outcomes[0].stamps_s[0]


def test_every_case_is_told_apart() -> None:
    """Keys are unique: they name figures."""
    keys = [case.key for case in CASES]

    assert len(set(keys)) == len(keys)
