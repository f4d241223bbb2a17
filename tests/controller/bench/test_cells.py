"""What a bench measures: sizes in bounds, prompts of their own, medians without the warm-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxd_controller.bench.cells import Cell, Ran, figure_of, plan_of, prompts_of
from mlxd_controller.bench.report import HEADINGS, report_of, table_rows
from mlxd_controller.bench.requests import GRPC, Job, Request, job_from_json, job_to_json
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.measuring import Outcome, prefill_tokens_per_s
from mlxd_shared.security.secure_channel import ChannelSecurity


def test_every_length_in_every_number_of_rows() -> None:
    """In their order, each once; the context holds the longest stream."""
    plan = plan_of("128, 2048,128", "1,8", new_tokens=100, runs=3)

    sizes = [(128, 1), (128, 8), (2048, 1), (2048, 8)]
    assert plan.cells == tuple(Cell(*size) for size in sizes)
    assert (plan.rows, plan.context) == (8, 2148)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", {"prompts": "0"}),
        ("prompt", {"prompts": "1,x"}),
        ("prompt", {"prompts": ""}),
        ("prompt", {"prompts": "-1"}),
        ("prompt", {"prompts": ",".join(map(str, range(1, 18)))}),
        ("rows", {"rows": str(config.ROWS_MAX_LIMIT + 1)}),
        ("tokens", {"new_tokens": 1}),
        ("runs", {"runs": 0}),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_option(
    field: str, values: dict[str, str | int]
) -> None:
    """With what was given, or the limit."""
    sizes: dict[str, str | int] = {
        "prompts": "8",
        "rows": "1",
        "new_tokens": 8,
        "runs": 1,
        **values,
    }
    with pytest.raises(InvalidRequest) as caught:
        plan_of(**sizes)  # type: ignore[arg-type]

    assert [violation.field for violation in caught.value.violations] == [field]


def test_prompts_are_of_their_length_and_never_made_twice() -> None:
    """One more run than is counted, and for all ways the same ones."""
    plan, cell = plan_of("5", "2", new_tokens=8, runs=3), Cell(5, 2)
    runs = list(prompts_of(plan, cell, 100))

    assert [[len(ids) for ids in run] for run in runs] == [[5, 5]] * 4
    assert len({tuple(ids) for run in runs for ids in run}) == 8
    assert all(0 < token < 100 for run in runs for ids in run for token in ids)
    assert list(prompts_of(plan, cell, 100)) == runs


def run_of(first_s: float, gap_s: float, peak_nbytes: int) -> Ran:
    """Return a run of two streams of three tokens."""
    stamps_s = (first_s, first_s + gap_s, first_s + 2 * gap_s)
    return Ran((Outcome(0.0, stamps_s, (1, 1, 1), ""),) * 2, peak_nbytes)


def test_figures_are_medians_of_the_runs_that_count() -> None:
    """The first one warms up; the peak is the highest of the others."""
    runs = [run_of(9.0, 9.0, 90), run_of(1.0, 0.5, 10), run_of(2.0, 0.25, 30), run_of(4.0, 1.0, 20)]
    figure = figure_of("engine", Cell(10, 2), runs)

    assert (figure.runs, figure.peak_nbytes) == (3, 30)
    assert figure.values["ttft_p50_s"] == 2.0
    assert figure.values["prefill_tokens_per_s"] == 10.0
    assert figure.values["decode_tokens_per_s"] == 4.0
    assert figure.values["itl_p50_s"] == 0.5
    (row,) = table_rows([figure])
    assert len(row) == len(HEADINGS)
    assert row[:6] == ("engine", "10", "2", "10.0", "2000.00", "4.0")


def test_prefill_ends_with_the_last_first_token() -> None:
    """Prompts of streams that are read side by side are counted together."""
    outcomes = [Outcome(1.0, (2.0,), (1,), ""), Outcome(2.0, (5.0,), (1,), "")]

    assert prefill_tokens_per_s(outcomes, 10) == 20 / 4


def test_a_report_to_share_says_nothing_private() -> None:
    """Digest, versions, machine and figures; neither path nor host nor name."""
    figure = figure_of("engine", Cell(10, 1), [run_of(1.0, 0.5, 10)] * 2)
    plan = plan_of("10", "1", new_tokens=3, runs=1)
    facts = {"vocab_size": 9, "weights": "float32", "device": "cpu: x", "blas": "openblas"}
    report = report_of([figure], plan, digest="ab" * 32, facts=facts)

    assert report["model"] == {"digest": "ab" * 32, "weights": "float32"}
    assert {"mlxd", "python"} <= report["versions"].keys()
    assert report.keys() == {"mlxd_bench", "machine", "versions", "model", "settings", "figures"}
    assert str(Path.home()) not in json.dumps(report)


def test_how_a_server_is_reached_crosses_to_the_generator() -> None:
    """By the names of files, never by what is in them."""
    security = ChannelSecurity(tls_ca=Path("/ca"), token_file=Path("/token"))
    job = Job(GRPC, "h:1", "m", (), (Request("", 2, 3, ids=(1, 2)),), clients=1, security=security)

    assert job_from_json(job_to_json(job)) == job
