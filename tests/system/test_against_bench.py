"""The bench that puts two checkouts side by side: here a tree beside itself."""

from __future__ import annotations

import json

import pytest

from tests.bench.against import (
    HERE,
    JUDGED,
    NEW,
    OLD,
    judge,
    serving_lines,
    starting_lines,
)
from tests.bench.cases import Case, make_closed
from tests.bench.server import DEMO
from tests.bench.starting import STARTING


@pytest.mark.asyncio
async def test_both_trees_are_served_and_measured() -> None:
    """Each by a controller and worker of its own, with as many rounds as were asked for."""
    short = Case("short", "", make_closed(2, 16, 4))
    lines = await serving_lines(
        {NEW: HERE, OLD: HERE}, DEMO, "demo", context=64, cases=(short,), rounds=1, alone=()
    )
    reports = [json.loads(line) for line in lines]

    assert [report["key"] for report in reports] == [f"against.demo.short.{n}" for n in JUDGED]
    assert all(report["this"] > 0 and report["other"] > 0 for report in reports)
    assert {report["runs"] for report in reports} == {1}


@pytest.mark.asyncio
async def test_both_trees_are_started() -> None:
    """Each server until it listens, and until it has drawn a token of a model."""
    lines = await starting_lines({NEW: HERE, OLD: HERE}, rounds=1)
    reports = [json.loads(line) for line in lines]

    assert [report["key"] for report in reports] == [f"against.start.{n}" for n in STARTING]
    assert all(report["this"] > 0 and report["other"] > 0 for report in reports)


@pytest.mark.parametrize(
    ("name", "this", "worse"),
    [
        ("tokens_per_s", [90.0, 97.1, 300.0], False),
        ("tokens_per_s", [90.0, 97.0, 300.0], True),
        ("ttft_p50_s", [1.0, 102.9, 400.0], False),
        ("ttft_p50_s", [1.0, 103.1, 400.0], True),
    ],
)
def test_more_tokens_and_fewer_seconds_are_better(
    name: str, this: list[float], *, worse: bool
) -> None:
    """By medians, and from three hundredths on."""
    measured = {NEW: [{name: value} for value in this], OLD: [{name: 100.0}]}
    (line,) = judge("case", measured, (name,))

    assert json.loads(line)["worse"] == worse
