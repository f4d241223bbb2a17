"""What was measured replaces what was reckoned, for the same way to live, and outlives the load."""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.core import events as ev
from mlxd_controller.core import phases
from mlxd_controller.core.report import report
from mlxd_models.fit.measured import KNOWN_MAX, Figures, Known, learn, recall
from mlxd_models.fit.plan import Choice, Plan
from mlxd_models.fit.planner import MEASURED, plan_load
from mlxd_shared.config import MIB
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights
from tests.controller.core.conversation import Conversation
from tests.support.model_facts import device, facts

ROOMY = device(4000)
WAY = Choice(Weights.FLOAT32, 1024, 4, KVFormat.MODEL, prefix_bytes=None)
FIGURES = Figures(weights=11 * MIB, peak=12 * MIB, process=70 * MIB)


def by_name(plan: Plan | None) -> dict[str, int]:
    """Return the terms by name."""
    assert plan is not None
    return {term.name: term.nbytes for term in plan.terms}


def measured_terms(plan: Plan | None) -> set[str]:
    """Return the names of the terms that say that they were measured."""
    assert plan is not None
    return {term.name for term in plan.terms if term.note == MEASURED}


def test_what_cannot_grow_is_replaced_and_what_is_promised_stays() -> None:
    """Weights and process are as measured; keys and values not used yet stay reserved."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    before = talk.model("m").plan

    talk.send(ev.Measured(talk.worker("m"), FIGURES))
    after = talk.model("m").plan

    kept = ("kv", "prefix", "activations", "pool")
    assert [by_name(after)[name] for name in kept] == [by_name(before)[name] for name in kept]
    assert (by_name(after)["weights"], by_name(after)["process"]) == (11 * MIB, 70 * MIB)
    assert measured_terms(after) == {"weights", "process"}
    assert talk.state.reserved_on(talk.state.devices[0]) == sum(by_name(after).values())


def test_a_peak_beyond_what_was_reckoned_is_reserved() -> None:
    """What arrays took beyond weights and promises counts as activations, and never less."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    before = by_name(talk.model("m").plan)
    high = 11 * MIB + before["kv"] + before["prefix"] + before["activations"] + 5 * MIB

    talk.send(ev.Measured(talk.worker("m"), replace(FIGURES, peak=high)))
    talk.send(ev.Measured(talk.worker("m"), FIGURES))

    assert by_name(talk.model("m").plan)["activations"] == before["activations"] + 5 * MIB


def test_a_later_load_is_planned_with_it_and_the_report_says_so() -> None:
    """Unloaded and asked for again: the plan has the measured terms; another context has not."""
    talk = Conversation(ROOMY)
    talk.make_idle("m")
    talk.send(ev.Measured(talk.worker("m"), FIGURES))
    talk.unload("m", force=True)
    talk.note_gone("m")
    assert talk.phase("m") is phases.Unloaded

    same = report(talk.state, "m", facts(10), LoadSpec()).plan
    other = report(talk.state, "m", facts(10), LoadSpec(context_length=512)).plan
    talk.arrive("m")

    assert measured_terms(same) == measured_terms(talk.model("m").plan) == {"weights", "process"}
    assert measured_terms(other) == set()
    assert measured_terms(report(talk.state, "n", facts(10), LoadSpec()).plan) == set()


def test_room_that_a_measurement_frees_is_given_to_who_waits() -> None:
    """A process smaller than reckoned lets the next model in, though nothing else has changed."""
    one = plan_load(facts(10), LoadSpec(), ROOMY)
    talk = Conversation(device(2 * one.need_bytes // MIB - 1))
    talk.serve("a")
    talk.arrive("b")
    assert talk.phase("b") is phases.Queued

    small = Figures(weights=10 * MIB, peak=10 * MIB, process=by_name(one)["process"] - 2 * MIB)
    talk.send(ev.Measured(talk.worker("a"), small))

    assert talk.phase("b") is phases.Loading


def test_figures_of_a_worker_that_is_no_longer_the_models_are_not_believed() -> None:
    """Neither of a former worker, nor while a load goes on, nor of one that is leaving."""
    talk = Conversation(ROOMY)
    talk.arrive("m")
    loading = talk.state
    talk.send(ev.Measured(talk.worker("m"), FIGURES))
    assert talk.state == loading
    talk.ready("m")
    ready = talk.state
    talk.send(ev.Measured(talk.worker("m") + 1, FIGURES))
    assert talk.state == ready


def test_the_largest_figures_count_and_few_ways_are_remembered() -> None:
    """Peak and process only grow; the way that was measured longest ago goes first."""
    known = learn((), WAY, FIGURES)
    known = learn(known, WAY, Figures(weights=10 * MIB, peak=5 * MIB, process=90 * MIB))
    assert known == (Known(WAY, Figures(weights=10 * MIB, peak=12 * MIB, process=90 * MIB)),)

    for rows in range(KNOWN_MAX):
        known = learn(known, replace(WAY, rows_max=10 + rows), FIGURES)
    assert len(known) == KNOWN_MAX
    assert recall(known, WAY) is None
    assert recall(known, replace(WAY, rows_max=10)) == FIGURES


def test_a_process_that_nobody_can_measure_stays_as_reckoned() -> None:
    """On a GPU the resident set says nothing of arrays."""
    talk = Conversation(ROOMY)
    talk.serve("m")
    talk.send(ev.Measured(talk.worker("m"), replace(FIGURES, process=0)))
    assert measured_terms(talk.model("m").plan) == {"weights"}
