"""Rates out of counters: tokens a second, and first-token times, of one server's looks."""

from __future__ import annotations

import datetime as dt

import pytest

from mlxd.messages import Model, Status
from mlxd.v1 import status_pb2, types_pb2
from mlxd_controller.cli.top.figures import (
    FIRST_SPAN_S,
    Look,
    Looks,
    first_token,
    look_at,
    median,
    speed_of,
    view_of,
)
from mlxd_shared.wire.records import read, timestamp_to_pb
from tests.fakes import replies

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def look(at_s: float, tokens: float, *first: int) -> Look:
    """A look with so many tokens of one model, and first tokens in buckets up to 0.1, 1 s."""
    counts = {"m": first} if first else {}
    return Look(at_s, START, {"m": tokens}, counts, (0.1, 1.0))


def status_at(at_s: float, tokens: float, *, start_s: float = replies.NOON) -> Status:
    """A status with a counter of tokens under two sets of labels."""
    pb = replies.status()
    pb.now.CopyFrom(timestamp_to_pb(at_s))
    pb.start_time.CopyFrom(timestamp_to_pb(start_s))
    pb.metrics.append(
        status_pb2.MetricFamily(
            name="mlxd_generation_tokens_total",
            kind=status_pb2.METRIC_KIND_COUNTER,
            points=[
                status_pb2.MetricPoint(labels={"model": "demo", "kind": kind}, value=tokens / 2)
                for kind in "ab"
            ],
        )
    )
    return read(Status, pb)


def test_a_speed_is_that_of_the_last_seconds() -> None:
    """Not of the time before: a stream that has ended is no speed."""
    assert speed_of("m", [look(0, 0)]) is None
    assert speed_of("m", [look(0, 0), look(1, 50)]) == 50
    assert speed_of("m", [look(0, 0), look(5, 500), look(8, 500)]) == 0
    assert speed_of("other", [look(0, 0), look(1, 50)]) == 0
    assert speed_of("m", [look(1, 0), look(1, 50)]) is None


def test_first_tokens_are_those_of_the_last_minute() -> None:
    """The median within its bucket; none where no request has had its first token since."""
    assert first_token("m", [look(0, 0, 4, 0, 0)]) == pytest.approx(0.05)
    recent = [look(0, 0, 9, 0, 0), look(1, 0, 9, 2, 0)]
    assert first_token("m", recent) == pytest.approx(0.55)
    assert first_token("m", [look(0, 0, 9, 0, 0), look(FIRST_SPAN_S, 0, 9, 0, 0)]) is None
    assert first_token("m", []) is None


def test_a_median_beyond_all_bounds_is_the_last_bound() -> None:
    """As Prometheus has it; of nothing there is none."""
    assert median((0, 0, 3), (0.1, 1.0)) == 1.0
    assert median((0, 0, 0), (0.1, 1.0)) is None
    assert median((1,), ()) is None


def test_a_server_that_starts_anew_begins_anew() -> None:
    """What it counts has nothing to do with the counters before."""
    looks = Looks()
    looks.add(status_at(replies.NOON + 1, 1000))
    looks.add(status_at(replies.NOON + 2, 1010))
    assert speed_of("demo", looks.kept) == 10
    looks.add(status_at(replies.NOON + 3, 2, start_s=replies.NOON + 2.5))
    assert speed_of("demo", looks.kept) is None


def test_what_is_old_is_dropped_but_for_one_look() -> None:
    """So that a minute is a minute, however long the view is open."""
    looks = Looks()
    for second in range(200):
        looks.add(status_at(replies.NOON + second, second))
    spans = [looks.kept[-1].at_s - each.at_s for each in looks.kept]
    assert FIRST_SPAN_S < spans[0] <= FIRST_SPAN_S + 1
    assert len(spans) == int(FIRST_SPAN_S) + 2


def test_a_view_joins_models_with_their_workers() -> None:
    """Only the living one counts; streams that no worker has yet wait; what is unloaded is out."""
    waiting = replies.model("late", state="LOADING")
    waiting.streams_active = 3
    models = [read(Model, pb) for pb in (
        replies.model(), waiting, replies.model("off", state="UNLOADED"),
        types_pb2.Model(name="bad", state=types_pb2.MODEL_STATE_FAILED, error="it died"),
    )]  # fmt: skip
    status = status_at(replies.NOON + 90, 5)
    view = view_of(status, models, [look_at(status)])
    demo, late, bad = view.models

    assert (demo.held_nbytes, demo.running, demo.waiting) == (12 * replies.MIB, 1, 0)
    assert [account.name for account in demo.accounts] == ["weights"]
    assert (late.loaded_fraction, late.waiting, late.accounts) == (0.5, 3, ())
    assert (bad.name, bad.error) == ("bad", "it died")
    assert view.up_s == 90
