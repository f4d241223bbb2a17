"""Conversations with the scheduler core: how models leave, what loads fix, what reports say."""

from __future__ import annotations

import math
from dataclasses import replace

from mlxd_controller.core import actions as a
from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.phases import StopReason
from mlxd_controller.core.report import report
from mlxd_controller.core.state import next_wake_s
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_shared import config
from mlxd_shared.config import MIB
from mlxd_shared.domain.errors import (
    InvalidRequest,
    ModelDraining,
    ModelTooLarge,
    ModelUnloaded,
    NoRoom,
    ShuttingDown,
    WorkerExited,
)
from mlxd_shared.domain.requests import KVFormat, LoadSpec, SamplingOptions, Weights
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts, need_mib

ROOMY = device(need_mib(10) * 8)
TWO = device(need_mib(10) * 2)
EXIT = WorkerExited("m", ("last words",), 3)


def kinds(wanted: tuple[a.Action, ...]) -> list[str]:
    """Return the actions' names."""
    return [type(action).__name__ for action in wanted]


# --- keep-alive ----------------------------------------------------------------------------------


def test_an_idle_model_is_unloaded_after_its_keep_alive() -> None:
    """Five minutes by default, counted from the last use; a request starts it anew."""
    talk = Conversation(ROOMY, keep_alive_s=config.KEEP_ALIVE_DEFAULT_S)
    talk.make_idle("m")
    talk.wait(299)
    talk.make_idle("m")
    assert talk.wait(299) == ()
    assert next_wake_s(talk.state) == talk.now_s + 1
    worker = talk.worker("m")
    assert talk.wait(1) == (a.StopWorker(worker, "m", StopReason.EXPIRED),)


def test_a_model_in_use_never_expires() -> None:
    """A stream may be longer than any keep-alive."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    assert talk.wait(10_000) == ()
    assert math.isinf(next_wake_s(talk.state))


def test_keep_alive_zero_unloads_as_soon_as_the_model_is_idle() -> None:
    """The request is served to its end first."""
    talk = Conversation(ROOMY)
    ticket, _ = talk.arrive("m", keep_alive_s=0.0)
    talk.ready("m")
    assert kinds(talk.release("m", ticket)) == ["StopWorker"]


def test_keep_alive_for_ever_never_unloads() -> None:
    """Infinite: no time makes it go."""
    talk = Conversation(ROOMY)
    ticket, _ = talk.arrive("m", keep_alive_s=math.inf)
    talk.ready("m")
    talk.release("m", ticket)
    assert talk.wait(1e9) == ()


def test_an_absent_keep_alive_keeps_what_was_said_before() -> None:
    """A request that says nothing changes nothing."""
    talk = Conversation(ROOMY)
    ticket, _ = talk.arrive("m", keep_alive_s=10.0)
    talk.ready("m")
    talk.release("m", ticket)
    talk.make_idle("m")
    assert talk.wait(9) == ()
    assert kinds(talk.wait(1)) == ["StopWorker"]


# --- unloading -----------------------------------------------------------------------------------


def test_unloading_what_is_not_loaded_is_a_success() -> None:
    """Idempotent: never seen, unloaded and failed models alike."""
    talk = Conversation(ROOMY)
    assert kinds(talk.unload("m")[1]) == ["Done"]
    talk.serve("m")
    talk.die("m")
    assert kinds(talk.unload("m")[1]) == ["Done"]
    assert talk.phase("m") is phases.Unloaded


def test_an_unload_waits_for_streams_and_takes_no_new_one() -> None:
    """Draining: the stream ends by itself, newcomers are told to come back, then it is gone."""
    talk = Conversation(ROOMY)
    stream = talk.serve("m")
    ticket, wanted = talk.unload("m")
    assert wanted == ()
    late, _ = talk.arrive("m")
    assert isinstance(talk.refusal(late), ModelDraining)
    assert kinds(talk.release("m", stream)) == ["StopWorker"]
    assert talk.note_gone("m") == (a.Done(ticket, 0),)


def test_the_grace_of_an_unload_ends_the_streams() -> None:
    """When the grace is over, streams end with ModelUnloaded and the worker stops."""
    talk = Conversation(ROOMY)
    stream = talk.serve("m")
    ticket, _ = talk.unload("m", grace_s=30)
    assert talk.wait(29) == ()
    assert kinds(talk.wait(1)) == ["AbortStreams", "StopWorker"]
    assert isinstance(talk.aborted[stream], ModelUnloaded)
    assert talk.note_gone("m") == (a.Done(ticket, 1),)
    assert talk.release("m", stream) == ()


def test_force_ends_the_streams_at_once() -> None:
    """Force needs no grace, also where a gentle unload waits already; both are answered."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    gentle, _ = talk.unload("m", grace_s=30)
    forced, wanted = talk.unload("m", force=True)
    assert kinds(wanted) == ["AbortStreams", "StopWorker"]
    assert talk.note_gone("m") == (a.Done(gentle, 1), a.Done(forced, 1))


def test_an_unload_refuses_who_waits_for_the_load() -> None:
    """A load that an operator ends: its waiters hear that, and the worker is stopped."""
    talk = Conversation(ROOMY)
    waiting, _ = talk.arrive("m")
    ticket, wanted = talk.unload("m")
    assert kinds(wanted) == ["Refuse", "StopWorker"]
    assert isinstance(talk.refusal(waiting), ModelUnloaded)
    assert talk.ready("m") == ()
    assert talk.note_gone("m") == (a.Done(ticket, 0),)


def test_a_worker_that_dies_while_draining_completes_the_unload() -> None:
    """What the operator wanted has happened."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    ticket, _ = talk.unload("m")
    assert talk.die("m") == (a.Done(ticket, 0),)
    assert talk.phase("m") is phases.Unloaded


# --- options -------------------------------------------------------------------------------------


def test_a_load_fixes_options_until_an_operator_unloads() -> None:
    """Options survive expiry and eviction, and are forgotten by UnloadModel."""
    talk = Conversation(ROOMY)
    spec = LoadSpec(
        context_length=256,
        rows_max=2,
        keep_alive_s=5.0,
        kv_format=KVFormat.MODEL,
        prefix_cache_nbytes=MIB,
    )
    talk.load("m", spec)
    talk.ready("m")
    talk.wait(5)
    talk.note_gone("m")
    talk.serve("m")
    plan = talk.model("m").plan
    assert plan is not None
    assert (plan.context_length, plan.rows_max, plan.prefix_bytes) == (256, 2, MIB)
    talk.unload("m", force=True)
    talk.note_gone("m")
    talk.serve("m")
    plan = talk.model("m").plan
    assert plan is not None
    assert plan.context_length == 1024
    assert talk.model("m").keep_alive_s == 300.0


def test_other_options_for_a_loaded_model_are_refused_by_name() -> None:
    """Loading what is loaded is a success; loading it otherwise names each field in conflict."""
    talk = Conversation(ROOMY)
    talk.make_idle("m")
    assert kinds(talk.load("m", LoadSpec(context_length=1024))[1]) == ["Done"]
    other = LoadSpec(
        context_length=512,
        rows_max=1,
        weights=Weights.BFLOAT16,
        sampling=SamplingOptions(top_k=3),
        kv_format=KVFormat.Q8,
        prefix_cache_nbytes=5,
        ranks=2,
    )
    error = talk.refusal(talk.load("m", other)[0])
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == [
        "options.context_length", "options.rows_max", "options.weights", "options.kv_format",
        "options.prefix_cache_bytes", "options.ranks", "options.sampling",
    ]  # fmt: skip


def test_a_refused_load_leaves_no_trace() -> None:
    """Options that cannot be had are not remembered for the next request."""
    talk = Conversation(device(need_mib(10) + 10))
    caches = CacheSizes(kv_values_per_token=64 * 2 * 8, kv_heads=1, head_dim=8)
    long = replace(facts(10, context_max=1 << 20), caches=caches)
    ticket, _ = talk.load("m", LoadSpec(context_length=1 << 20), model=long)
    assert isinstance(talk.refusal(ticket), ModelTooLarge)
    assert "m" not in talk.state.models
    assert kinds(talk.arrive("m")[1]) == ["StartLoad"]


def test_a_load_that_found_no_room_leaves_no_trace() -> None:
    """Pin, keep-alive and options of a load that was refused are not in force for the next one."""
    talk = Conversation(device(need_mib(10)))
    talk.make_idle("m")
    talk.load("m", LoadSpec(pinned=True, keep_alive_s=7.0))
    talk.unload("m")
    talk.note_gone("m")
    busy = talk.serve("x")
    ticket, _ = talk.load("m", LoadSpec(context_length=256, pinned=True, keep_alive_s=7.0))
    talk.wait(config.ROOM_WAIT_MAX_S)
    assert isinstance(talk.refusal(ticket), NoRoom)
    talk.release("x", busy)
    talk.arrive("m")
    talk.note_gone("x")
    model = talk.model("m")
    assert (model.pinned, model.keep_alive_s, model.spec.context_length) == (False, 300.0, None)


def test_pin_and_keep_alive_change_without_a_reload() -> None:
    """They are the controller's own, so a loaded model takes them at once."""
    talk = Conversation(ROOMY)
    talk.make_idle("m")
    talk.load("m", LoadSpec(pinned=True, keep_alive_s=math.inf))
    assert talk.model("m").pinned
    assert math.isinf(talk.model("m").keep_alive_s)


# --- stopping ------------------------------------------------------------------------------------


def test_a_shutdown_refuses_waits_and_ends() -> None:
    """Waiters and newcomers are refused, idle models go at once, streams get the grace."""
    talk = Conversation(ROOMY)
    talk.make_idle("idle")
    stream = talk.serve("busy")
    waiting, _ = talk.arrive("loading")
    wanted = talk.send(ev.ShutDown(10))
    assert kinds(wanted) == ["StopWorker", "Refuse", "StopWorker"]
    late, _ = talk.arrive("m")
    assert isinstance(talk.refusal(waiting), ShuttingDown)
    assert isinstance(talk.refusal(late), ShuttingDown)
    assert kinds(talk.wait(10)) == ["AbortStreams", "StopWorker"]
    assert isinstance(talk.aborted[stream], ShuttingDown)


# --- reports -------------------------------------------------------------------------------------


def test_a_report_says_what_a_load_would_do_and_does_nothing() -> None:
    """Fits now, fits with victims, fits never: each with the figures."""
    talk = Conversation(TWO)
    first = report(talk.state, "m", facts(10), LoadSpec())
    assert (first.fits_now, first.fits_ever, first.would_evict) == (True, True, ())
    talk.make_idle("x")
    talk.wait(1)
    talk.make_idle("y")
    full = report(talk.state, "m", facts(10), LoadSpec())
    assert (full.fits_now, full.fits_ever, full.would_evict) == (False, True, ("x",))
    never = report(talk.state, "h", facts(5000), LoadSpec())
    assert (never.fits_ever, never.would_evict) == (False, ())
    assert never.suggestions


def test_a_report_says_what_would_fit_beside_those_who_stay() -> None:
    """Where the memory is there but cannot be had, because of a pin, or because of models in use:
    what would do with less; nothing where only a slot is missing."""
    budget_mib = need_mib(10) + need_mib(200) - 50
    talk = Conversation(device(budget_mib))
    talk.load("m", LoadSpec(pinned=True))
    talk.ready("m")

    spec = LoadSpec(weights=Weights.FLOAT32)
    fit_report = report(talk.state, "large", facts(200), spec)
    assert (fit_report.fits_now, fit_report.fits_ever, fit_report.would_evict) == (False, True, ())
    assert fit_report.suggestions == ("weights as bfloat16",)
    smaller = report(talk.state, "large", facts(200), LoadSpec(weights=Weights.BFLOAT16))
    assert (smaller.fits_now, smaller.suggestions) == (True, ())
    talk.state = replace(talk.state, max_loaded=1)
    assert report(talk.state, "large", facts(200), spec).suggestions == ()


def test_a_report_about_a_loaded_model_describes_the_plan_in_force() -> None:
    """Its own memory counts as its own: it fits."""
    talk = Conversation(TWO)
    talk.make_idle("x")
    talk.make_idle("y")
    fit_report = report(talk.state, "x", facts(10), LoadSpec())
    assert fit_report.fits_now
    assert fit_report.plan == talk.model("x").plan


def test_a_report_cuts_an_open_prefix_cache_to_the_room_it_would_have() -> None:
    """The terms are those of the load that would follow: beside others, or after evicting them."""
    budget_mib = need_mib(10) * 2 + 4
    talk = Conversation(device(budget_mib, prefix_fraction=0.25))
    talk.load("first", LoadSpec(prefix_cache_nbytes=0))
    talk.ready("first")

    beside = report(talk.state, "m", facts(10), LoadSpec())
    assert beside.fits_now
    assert beside.plan.need_bytes == beside.available_bytes
    wider = LoadSpec(context_length=1024, rows_max=64)
    after = report(talk.state, "m", facts(30), wider)
    assert (after.fits_now, after.would_evict) == (False, ("first",))
    assert after.plan.need_bytes <= budget_mib * MIB
