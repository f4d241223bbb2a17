"""Every real schema: as many compile as with the library alone, and what compiles is enforced."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.real_inputs import real_input
from tests.support.schema_runs import DATA, LEFT_OUT, Outcome, figures, shard

WALKS = 5
SHARDS = 16
COMPILED_MIN = 0.98
REJECTED_MIN = 0.99


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """What became of all of them, looked at by a process for each processor."""
    path = real_input(*DATA)
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        futures = [pool.submit(shard, path, start, SHARDS, WALKS) for start in range(SHARDS)]
        return [outcome for future in futures for outcome in future.result()]


@pytest.mark.timeout(1800)
def test_as_many_compile_as_with_the_library_alone(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    """More schemas compile and are right on all their instances; the rest tells what and where."""
    report = figures(outcomes)
    with capsys.disabled():
        print("\n" + json.dumps(report, indent=1, ensure_ascii=False))  # noqa: T201 - asked for
    refused = [outcome.refused for outcome in outcomes if outcome.refused]

    assert report["compiled"] >= COMPILED_MIN * report["schemas"]
    assert report["compiled"] >= report["alone_compiled"]
    assert report["right"] >= report["alone_right"]
    assert [text for text in refused if not text.startswith("response_format.json_schema: ")] == []


@pytest.mark.timeout(1800)
def test_nothing_invalid_is_complete(outcomes: list[Outcome]) -> None:
    """No random walk through the masks, and no instance with a change, ends in what is wrong."""
    assert [(outcome.name, output) for outcome in outcomes for output in outcome.invalid] == []


@pytest.mark.timeout(1800)
def test_instances_are_judged_as_they_are_labelled(outcomes: list[Outcome]) -> None:
    """Every valid one is accepted, its members in the schema's order; the invalid ones are not."""
    tests = [test for outcome in outcomes for test in outcome.tests]
    invalid = [test for test in tests if not test.label]
    missed = {
        outcome.name
        for outcome in outcomes
        for test in outcome.tests
        if test.label and not test.ordered
    }

    assert missed == LEFT_OUT
    assert sum(not test.ordered for test in invalid) >= REJECTED_MIN * len(invalid)
    assert not any(test.ordered and test.judged is False for test in tests)
