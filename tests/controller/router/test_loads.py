"""How busy a model is, in the words of routers."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_controller.router.loads import Load, load_of, loads_to_pb, record_to_pb
from mlxd_shared.domain.figures import WorkerFigures

BUSY = WorkerFigures(
    streams_running=3, streams_waiting=2, kv_tokens_used=300, kv_tokens_capacity=400, rows_max=4
)


def test_load_is_what_the_workers_report() -> None:
    """Of all of a model's; what is kept of former prompts is no token in use."""
    load = load_of([BUSY, BUSY], calls=1, age_s=0.5)
    assert load == Load(running=6, waiting=4, tokens=600, tokens_max=800, rows=8, age_s=0.5)
    assert load.usage == 0.75


@pytest.mark.parametrize(("calls", "waiting"), [(0, 2), (5, 2), (9, 6)])
def test_calls_that_no_worker_has_yet_wait(calls: int, waiting: int) -> None:
    """Those beyond what runs, whichever is more: a worker may have streams of others."""
    assert load_of([BUSY], calls=calls).waiting == waiting


def test_a_model_that_is_not_loaded_has_only_waiting_calls() -> None:
    """And no share of nothing."""
    load = load_of([], calls=2)
    assert load == Load(waiting=2)
    assert load.usage == 0.0


def test_a_poll_and_a_record_say_the_same() -> None:
    """Under their own names; a record has its age and its number, and no events."""
    load = load_of([BUSY], calls=0, age_s=0.25)
    answer: Any = loads_to_pb(load, unix_s=1_700_000_000.0, version="1.2")
    batch: Any = record_to_pb(load, sample=7, unix_s=1_700_000_000.0)
    (polled,), pushed = answer.loads, batch.load

    assert answer.timestamp == "2023-11-14T22:13:20+00:00"
    assert (answer.version, answer.dp_rank_count) == ("1.2", 1)
    assert (polled.num_running_reqs, polled.num_waiting_reqs) == (3, 2)
    assert (pushed.running_requests, pushed.waiting_requests) == (3, 2)
    assert polled.num_total_reqs == 5
    assert polled.max_running_requests == pushed.max_running_requests == 4
    assert polled.token_usage == pushed.token_usage == pushed.active_token_usage == 0.75
    assert polled.utilization == 0.75
    assert (pushed.num_used_tokens, pushed.max_total_num_tokens) == (300, 400)
    assert (pushed.age_ms, pushed.sample, pushed.load_only) == (250, 7, True)
    assert not batch.events
