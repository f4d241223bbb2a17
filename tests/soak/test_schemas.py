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
        return [found for future in futures for found in future.result()]


@pytest.mark.timeout(1800)
def test_as_many_compile_as_with_the_library_alone(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    """More schemas compile and are right on all their instances; the rest tells what and where."""
    told = figures(outcomes)
    with capsys.disabled():
        print("\n" + json.dumps(told, indent=1, ensure_ascii=False))  # noqa: T201 - asked for
    refused = [found.refused for found in outcomes if found.refused]

    assert told["compiled"] >= COMPILED_MIN * told["schemas"]
    assert told["compiled"] >= told["alone_compiled"]
    assert told["right"] >= told["alone_right"]
    assert [text for text in refused if not text.startswith("response_format.json_schema: ")] == []


@pytest.mark.timeout(1800)
def test_nothing_invalid_is_complete(outcomes: list[Outcome]) -> None:
    """No random walk through the masks, and no instance with a change, ends in what is wrong."""
    assert [(found.name, output) for found in outcomes for output in found.invalid] == []


@pytest.mark.timeout(1800)
def test_instances_are_judged_as_they_are_labelled(outcomes: list[Outcome]) -> None:
    """Every valid one is accepted, its members in the schema's order; the invalid ones are not."""
    tests = [test for found in outcomes for test in found.tests]
    invalid = [test for test in tests if not test.label]
    missed = {
        found.name for found in outcomes for test in found.tests if test.label and not test.ordered
    }

    assert missed == LEFT_OUT
    assert sum(not test.ordered for test in invalid) >= REJECTED_MIN * len(invalid)
    assert not any(test.ordered and test.judged is False for test in tests)
