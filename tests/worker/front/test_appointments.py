"""When refused clients are told to come back: measured, spread, bounded."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_shared.domain.errors import QueueFull
from mlxd_worker.front.streams import (
    GUESS_S,
    MARGIN,
    RETRY_MAX_S,
    RETRY_MIN_S,
    Appointments,
    Streams,
)
from tests.support.clocks import Clock

ROWS = 8


def busy(*, each_s: float, ends: int = 4 * ROWS + 1, group: int = 1) -> tuple[Appointments, float]:
    """Return what has seen streams end while others waited, `group` at once, and the time then."""
    appointments, now_s = Appointments(), 100.0
    for number in range(ends):
        now_s += each_s * group if number % group == 0 else 0.0
        appointments.note_end(now_s, rows_max=ROWS, others_waited=True)
    return appointments, now_s


@pytest.mark.parametrize("group", [1, ROWS])
@pytest.mark.parametrize("each_s", [0.01, 0.5, 3.0])
def test_the_interval_is_the_measured_one(each_s: float, group: int) -> None:
    """Whether streams end one by one or a batch at a time, the rate is that of their ends."""
    appointments, now_s = busy(each_s=each_s, group=group)
    assert appointments.interval_s(now_s, rows_max=ROWS) == pytest.approx(each_s, rel=0.3)


def test_without_measurements_a_guess_is_made() -> None:
    """Nobody has ended yet, or fewer than there are rows: the guess says so many seconds a row."""
    appointments, now_s = busy(each_s=9.0, ends=3)
    assert appointments.interval_s(now_s, rows_max=ROWS) == GUESS_S / ROWS
    assert Appointments().give(0.0, rows_max=ROWS) == pytest.approx(GUESS_S * MARGIN)


def test_while_nobody_ends_the_guess_grows() -> None:
    """Where streams last longer than guessed, whoever comes back is told a longer time."""
    appointments = Appointments()
    waits_s = [appointments.give(now_s, rows_max=1) for now_s in (0.0, 2.0, 8.0, 40.0)]

    assert waits_s == pytest.approx([GUESS_S * MARGIN, *(s * MARGIN for s in (2.0, 8.0, 40.0))])


def test_idle_time_tells_nothing_of_the_rate() -> None:
    """What was measured before nobody waited any more is forgotten: a pause is no slow rate."""
    appointments, now_s = busy(each_s=0.01)
    appointments.note_end(now_s + 1.0, rows_max=ROWS, others_waited=False)
    now_s += 3600.0
    for number in range(4 * ROWS):
        appointments.note_end(now_s + number * 0.02, rows_max=ROWS, others_waited=True)

    assert appointments.interval_s(now_s + 4 * ROWS * 0.02, rows_max=ROWS) == pytest.approx(
        0.02, rel=0.1
    )


def test_a_server_that_was_not_full_meanwhile_begins_to_guess_anew() -> None:
    """How long streams last is guessed from when it last became full, not from the first time."""
    appointments = Appointments()
    appointments.give(0.0, rows_max=1)
    appointments.note_end(1.0, rows_max=1, others_waited=False)

    assert appointments.give(1000.0, rows_max=1) == pytest.approx(GUESS_S * MARGIN)


def test_appointments_are_as_far_apart_as_places_come() -> None:
    """Clients refused together come back one by one, slower than places are given back."""
    appointments, now_s = busy(each_s=0.05)
    waits_s = [appointments.give(now_s, rows_max=ROWS) for _ in range(100)]

    gaps_s = [later - earlier for earlier, later in itertools.pairwise(waits_s)]
    assert gaps_s == pytest.approx([0.05 * MARGIN] * 99)
    assert waits_s[0] >= ROWS * 0.05


@given(
    each_s=st.floats(1e-4, 20.0),
    refusals=st.lists(st.floats(0.0, 0.5), min_size=2, max_size=300),
)
def test_the_more_wait_the_later(each_s: float, refusals: list[float]) -> None:
    """Whoever is refused later comes back later, up to the bound, and every wait is within it."""
    appointments, now_s = busy(each_s=each_s)
    last_s = 0.0
    for pause_s in refusals:
        now_s += pause_s
        wait_s = appointments.give(now_s, rows_max=ROWS)
        assert RETRY_MIN_S <= wait_s <= RETRY_MAX_S
        if wait_s < RETRY_MAX_S / 2:
            assert now_s + wait_s > last_s - 1e-9
            last_s = now_s + wait_s


def test_beyond_the_bound_they_are_spread_all_the_same() -> None:
    """A crowd too large for appointments comes back over minutes, not all at once."""
    appointments, now_s = busy(each_s=1.0)
    waits_s = sorted(appointments.give(now_s, rows_max=ROWS) for _ in range(1000))[-700:]

    assert waits_s[0] >= RETRY_MAX_S / 2
    assert len({round(wait_s, 2) for wait_s in waits_s}) > 400
    assert max(b - a for a, b in itertools.pairwise(waits_s)) < 1.0


@pytest.mark.asyncio
async def test_whoever_keeps_the_appointment_is_let_in() -> None:
    """Of a thousand for 40 places, each is let in by its third try if it comes when told."""
    clock, service_s = Clock(0.0), 0.5
    streams = Streams(waiting_max=32, clock=clock)
    running: dict[int, ExitStack] = {}
    tries = dict.fromkeys(range(1000), 0)
    due_s = dict.fromkeys(range(1000), 0.0)
    for tick in range(40_000):
        clock.now_s = tick * 0.01
        if tick % (service_s * 100) == 0:  # streams that began together end together
            for number in list(running)[:ROWS]:
                running.pop(number).close()
        for number in [n for n, at_s in due_s.items() if at_s <= clock.now_s]:
            stack = ExitStack()
            try:
                stack.enter_context(streams.open(str(number), rows_max=ROWS))
            except QueueFull as error:
                tries[number] += 1
                due_s[number] = clock.now_s + error.retry_after_s
            else:
                running[number] = stack
                del due_s[number]
        if not due_s:
            break
    for stack in running.values():
        stack.close()

    assert not due_s
    assert max(tries.values()) <= 3
    await asyncio.sleep(0)
