"""Conversations with the scheduler core: what it does in each situation, by name."""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.state import next_wake_s
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import (
    ModelTooLarge,
    NoRoom,
    QueueFull,
    WorkerExited,
)
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.requests import LoadSpec
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, need_mib

ROOMY = device(need_mib(10) * 8)
TWO = device(need_mib(10) * 2)
EXIT = WorkerExited("m", ("last words",), 3)


def kinds(wanted: tuple[a.Action, ...]) -> list[str]:
    """Return the actions' names."""
    return [type(action).__name__ for action in wanted]


# --- loading -------------------------------------------------------------------------------------


def test_the_first_request_loads_and_is_granted_when_ready() -> None:
    """A cold model: load now, grant when ready, tell what was waited."""
    talk = Conversation(ROOMY)
    ticket, wanted = talk.arrive("m")
    assert kinds(wanted) == ["StartLoad"]
    assert talk.phase("m") is phases.Loading

    talk.wait(7)
    worker = talk.worker("m")
    assert talk.ready("m") == (a.Grant(ticket, worker, 7.0),)


def test_one_load_however_many_wait() -> None:
    """Requests that come while a model loads wait for that load; all are granted together."""
    talk = Conversation(ROOMY)
    first, _ = talk.arrive("m")
    second, wanted = talk.arrive("m")
    third, _ = talk.load("m", LoadSpec())

    assert wanted == ()
    assert kinds(talk.ready("m")) == ["Grant", "Grant", "Done"]
    assert talk.model("m").leases == {first, second}
    assert isinstance(talk.answers[third], a.Done)


def test_the_first_clients_leaving_takes_nobodys_load_away() -> None:
    """Whoever asked first may go; the others' load goes on."""
    talk = Conversation(ROOMY)
    first, _ = talk.arrive("m")
    second, _ = talk.arrive("m")
    assert talk.release("m", first) == ()
    assert kinds(talk.ready("m")) == ["Grant"]
    assert isinstance(talk.answers[second], a.Grant)


def test_a_load_goes_on_though_everybody_left() -> None:
    """A load under way belongs to the controller: it completes and the model is idle."""
    talk = Conversation(ROOMY)
    ticket, _ = talk.arrive("m")
    talk.release("m", ticket)
    talk.ready("m")
    assert talk.model("m").idle


def test_a_request_that_leaves_the_queue_before_its_load_begins_starts_none() -> None:
    """Nothing is launched for a request that went away while victims were leaving."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    talk.make_idle("y")
    ticket, wanted = talk.arrive("m")
    assert kinds(wanted) == ["StopWorker"]
    talk.release("m", ticket)
    assert talk.note_gone("x") == ()
    assert talk.phase("m") is phases.Unloaded


def test_an_operators_load_stays_queued_though_its_client_left() -> None:
    """LoadModel is the controller's job: its client's going away does not end it."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    talk.make_idle("y")
    ticket, _ = talk.load("m", LoadSpec())
    talk.release("m", ticket)
    assert kinds(talk.note_gone("x")) == ["StartLoad"]


def test_a_failed_load_refuses_everyone_and_the_next_request_tries_again() -> None:
    """The reason reaches each waiter; FAILED is no dead end, and the restart says what was."""
    talk = Conversation(ROOMY)
    first, _ = talk.arrive("m")
    second, _ = talk.load("m", LoadSpec())
    talk.send(ev.LoadFailed(talk.worker("m"), EXIT))

    assert talk.refusal(first) is EXIT
    assert talk.refusal(second) is EXIT
    assert talk.phase("m") is phases.Failed
    _, wanted = talk.arrive("m")
    (start,) = wanted
    assert isinstance(start, a.StartLoad)
    assert (start.reason, start.restart) == ("request", "WorkerExited")


def test_progress_is_kept_while_loading_only() -> None:
    """Progress belongs to the load under way."""
    talk = Conversation(ROOMY)
    talk.arrive("m")
    talk.send(ev.Progressed(talk.worker("m"), LoadProgress("reading weights", 5, 10)))
    half = talk.model("m").phase
    assert isinstance(half, phases.Loading)
    assert half.progress.fraction == 0.5
    talk.send(ev.Progressed(99, LoadProgress("reading weights", 10, 10)))
    assert talk.model("m").phase == half


def test_a_worker_that_dies_fails_the_model_and_a_late_report_is_ignored() -> None:
    """The next request starts a new worker; what the dead one reports changes nothing."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    old = talk.worker("m")
    talk.die("m")
    assert talk.phase("m") is phases.Failed
    talk.arrive("m")
    assert talk.worker("m") != old
    assert talk.send(ev.Ready(old)) == ()
    assert talk.phase("m") is phases.Loading


def test_the_queue_of_waiters_is_bounded() -> None:
    """One more than LOAD_WAITERS_MAX is refused with the limit; a ready model has no such queue."""
    talk = Conversation(ROOMY)
    talk.serve("busy")
    for _ in range(config.LOAD_WAITERS_MAX):
        talk.arrive("m")
    ticket, _ = talk.arrive("m")
    error = talk.refusal(ticket)
    assert isinstance(error, QueueFull)
    assert error.limit == config.LOAD_WAITERS_MAX
    assert kinds(talk.arrive("busy")[1]) == ["Grant"]


# --- room ----------------------------------------------------------------------------------------


def test_a_model_that_can_never_fit_is_refused_at_once_and_evicts_nobody() -> None:
    """ "Can it ever fit" comes before any eviction, with every figure and a way out."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    ticket, wanted = talk.arrive("huge", 5000)
    assert kinds(wanted) == ["Refuse"]
    error = talk.refusal(ticket)
    assert isinstance(error, ModelTooLarge)
    assert error.need_bytes > error.budget_bytes == TWO.budget_bytes
    assert error.hint
    assert talk.phase("x") is phases.Ready


def test_the_least_recently_used_idle_model_makes_room() -> None:
    """One victim where one is enough, the one used longest ago; the load waits for its end."""
    talk = Conversation(TWO)
    talk.make_idle("old")
    talk.wait(5)
    talk.make_idle("new")
    old = talk.worker("old")
    _, wanted = talk.arrive("m")
    assert wanted == (a.StopWorker(old, "old", StopReason.ROOM),)
    assert talk.phase("m") is phases.Queued
    assert kinds(talk.note_gone("old")) == ["StartLoad"]
    assert talk.phase("new") is phases.Ready


def test_an_open_prefix_cache_evicts_nobody() -> None:
    """A load starts with what is free, less than its share or nothing; the order is the plan's."""
    budget_mib = need_mib(10) * 2 + 4
    talk = Conversation(device(budget_mib, prefix_fraction=0.25))
    talk.load("first", LoadSpec(prefix_cache_nbytes=0))
    talk.ready("first")
    _, (start,) = talk.arrive("second")
    assert isinstance(start, a.StartLoad)
    assert 0 < start.plan.prefix_bytes < budget_mib * MIB // 4
    assert talk.model("second").plan == start.plan
    assert talk.state.reserved_on(talk.state.devices[0]) == budget_mib * MIB
    assert talk.phase("first") is phases.Ready


def test_no_room_while_everybody_is_busy_waits_and_then_says_when_to_come_back() -> None:
    """Busy and pinned models are never evicted: a bounded wait, then when to retry."""
    talk = Conversation(TWO)
    talk.serve("x")
    talk.load("y", LoadSpec(pinned=True))
    talk.ready("y")
    ticket, wanted = talk.arrive("m")
    assert wanted == ()
    assert next_wake_s(talk.state) == talk.now_s + config.OVERTAKEN_MAX_S
    talk.wait(config.OVERTAKEN_MAX_S)  # from now on the busy model takes nobody, for a while
    talk.wait(config.HOLD_MAX_S)
    assert next_wake_s(talk.state) == talk.now_s + config.ROOM_WAIT_MAX_S - 20.0
    assert talk.wait(config.ROOM_WAIT_MAX_S - 21) == ()
    assert kinds(talk.wait(1)) == ["Refuse"]
    error = talk.refusal(ticket)
    assert isinstance(error, NoRoom)
    assert error.retry_after_s > 0
    assert error.queue_position == 1
    assert (talk.phase("x"), talk.phase("y")) == (phases.Ready, phases.Ready)


def test_a_stream_that_ends_makes_room_for_who_waits() -> None:
    """The queue moves by itself: the last lease ends, the model goes, the next one loads."""
    talk = Conversation(TWO)
    lease = talk.serve("x")
    talk.serve("y")
    ticket, _ = talk.arrive("m")
    talk.wait(3)
    assert talk.release("x", lease) == (a.StopWorker(talk.worker("x"), "x", StopReason.ROOM),)
    assert kinds(talk.note_gone("x")) == ["StartLoad"]
    talk.ready("m")
    assert isinstance(talk.answers[ticket], a.Grant)


def test_who_came_later_waits_on_when_an_earlier_one_has_waited_long_enough() -> None:
    """The bound is each request's own."""
    talk = Conversation(device(need_mib(10)))
    lease = talk.serve("x")
    first, _ = talk.arrive("m")
    talk.wait(20)
    second, _ = talk.arrive("m")
    assert kinds(talk.wait(10)) == ["Refuse"]
    assert isinstance(talk.refusal(first), NoRoom)
    talk.release("x", lease)
    talk.note_gone("x")
    talk.ready("m")
    assert isinstance(talk.answers[second], a.Grant)


def test_a_model_is_not_evicted_right_after_its_load() -> None:
    """A minimum age: two models that take turns do not chase each other out of memory."""
    talk = Conversation(device(need_mib(10)), age_min_s=5.0)
    talk.make_idle("x")
    talk.wait(2)
    _, wanted = talk.arrive("m")
    assert wanted == ()
    assert next_wake_s(talk.state) == talk.now_s + 3
    assert kinds(talk.wait(3)) == ["StopWorker"]


def test_a_crash_loop_is_slowed_down() -> None:
    """Two restarts at once; then each failure doubles the wait, and who comes waits for it."""
    talk = Conversation(ROOMY)
    starts_s = []
    for _ in range(5):
        talk.arrive("m")
        if talk.phase("m") is phases.Queued:
            talk.wait(next_wake_s(talk.state) - talk.now_s)
        starts_s.append(talk.now_s - 1000.0)
        talk.send(ev.LoadFailed(talk.worker("m"), EXIT))
    assert starts_s == [0.0, 0.0, 0.0, 1.0, 3.0]
    talk.unload("m")  # an operator's word ends it
    assert kinds(talk.arrive("m")[1]) == ["StartLoad"]


def test_a_loading_model_is_no_victim() -> None:
    """Between the start of a load and its first request nobody takes the model away."""
    talk = Conversation(TWO)
    talk.arrive("x")
    talk.arrive("y")
    assert talk.arrive("m")[1] == ()
    assert (talk.phase("x"), talk.phase("y")) == (phases.Loading, phases.Loading)


def test_a_victim_that_is_wanted_again_is_not_resurrected() -> None:
    """A request for a model that is on its way out waits for its end, then it is loaded anew."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    talk.make_idle("y")
    talk.arrive("m")
    ticket, wanted = talk.arrive("x")
    assert wanted == ()
    assert talk.phase("x") is phases.Unloading
    # "m" has the room now and is loading, "y" is idle: "x" queues behind it and evicts "y".
    assert kinds(talk.note_gone("x")) == ["StartLoad", "StopWorker"]
    assert talk.phase("x") is phases.Queued
    assert kinds(talk.note_gone("y")) == ["StartLoad"]
    talk.ready("x")
    assert isinstance(talk.answers[ticket], a.Grant)


def test_memory_that_others_hold_is_not_given_away() -> None:
    """Within the budget but not usable now: no room, rather than a machine that swaps."""
    talk = Conversation(ROOMY)
    talk.send(ev.MemoryRead((replace(ROOMY, usable_bytes=MIB),)))
    ticket, _ = talk.arrive("m")
    talk.wait(config.ROOM_WAIT_MAX_S)
    error = talk.refusal(ticket)
    assert isinstance(error, NoRoom)
    assert error.available_bytes == MIB


def test_the_number_of_models_is_bounded_too() -> None:
    """max_loaded evicts for a slot though there is memory."""
    talk = Conversation(ROOMY, max_loaded=1)
    talk.make_idle("x")
    _, wanted = talk.arrive("m")
    assert kinds(wanted) == ["StopWorker"]
    assert kinds(talk.note_gone("x")) == ["StartLoad"]


def test_room_that_an_earlier_model_waits_for_is_not_given_to_a_later_one() -> None:
    """A large model whose room becomes free bit by bit is not overtaken into starvation."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    talk.make_idle("y")
    large = need_mib(10) - 10  # alone it needs nearly all that there is
    first, wanted = talk.arrive("large", large)
    assert kinds(wanted) == ["StopWorker", "StopWorker"]
    talk.note_gone("x")
    _, wanted = talk.arrive("small", 1)
    assert wanted == ()
    assert kinds(talk.note_gone("y")) == ["StartLoad"]
    talk.ready("large")
    assert isinstance(talk.answers[first], a.Grant)


def test_a_slot_that_an_earlier_model_waits_for_is_taken() -> None:
    """One slot becomes free and two want it: the first gets it, the second waits for the next."""
    talk = Conversation(ROOMY, max_loaded=1)
    talk.make_idle("x")
    talk.arrive("first")
    assert talk.arrive("second")[1] == ()
    assert kinds(talk.note_gone("x")) == ["StartLoad"]
    assert (talk.phase("first"), talk.phase("second")) == (phases.Loading, phases.Queued)


def test_an_operators_load_of_a_model_on_its_way_out_survives_its_client() -> None:
    """Asked for while the worker ends: loaded anew, though nobody waits any more."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    talk.wait(300)
    assert talk.phase("x") is phases.Unloading
    ticket, _ = talk.load("x", LoadSpec())
    talk.release("x", ticket)
    assert kinds(talk.note_gone("x")) == ["StartLoad"]
