"""The one planner: the fastest form of the weights that fits, with the longest context. Pure.

Invariants:
- What was asked for is never changed: a context that was asked for and does not fit is reported as
  not fitting. Only what was left open is chosen, and the choice stands in the plan.
- An open prefix cache gives way first, down to nothing, before a context is shortened or another
  form taken, and before anybody is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.measured import Known, recall
from mlxd_models.fit.plan import Choice, Device, Plan, Term
from mlxd_models.fit.terms import reckon
from mlxd_shared import config
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights

CONTEXT_FLOOR_TOKENS = 256
"""An open context is not shortened further than to this."""

CONTEXT_USEFUL_TOKENS = 4096
"""Faster weights are not worth a context below this."""

MEASURED = "measured"
"""The note of a term that was."""


def plan_load(
    facts: ModelFacts, spec: LoadSpec, device: Device, *, known: tuple[Known, ...] = ()
) -> Plan:
    """Return the best plan for `device` that honours `spec`; the caller compares its need.

    known: what was measured of the model before.

    "Best" is the fastest form of the weights that fits the device's budget, with the longest
    context that does. Where nothing fits, the smallest plan is returned.
    """
    candidates = [_longest(facts, spec, device, weights, known) for weights in _forms(spec, device)]
    for candidate in candidates:
        fits = candidate.need_bytes <= device.budget_bytes
        if fits and is_useful(candidate, facts, spec):
            return candidate
    return min(candidates, key=lambda candidate: candidate.least_bytes)


def is_useful(plan: Plan, facts: ModelFacts, spec: LoadSpec) -> bool:
    """Return whether a plan has the context that was asked for, or enough of the model's own."""
    enough = min(facts.context_length_max, CONTEXT_USEFUL_TOKENS)
    return spec.context_length is not None or plan.context_length >= enough


def _forms(spec: LoadSpec, device: Device) -> tuple[Weights, ...]:
    if spec.weights is not Weights.AUTO:
        return (spec.weights,)
    # Products of quantised and 16-bit weights are scalar loops on a CPU: 10 to 400 times slower.
    return (Weights.FLOAT32, Weights.STORED) if device.on_cpu else (Weights.STORED,)


def _longest(
    facts: ModelFacts,
    spec: LoadSpec,
    device: Device,
    weights: Weights,
    known: tuple[Known, ...],
) -> Plan:
    choice = Choice(
        weights=weights,
        context_length=spec.context_length or facts.context_length_max,
        rows_max=spec.rows_max or config.ROWS_MAX_DEFAULT,
        kv_format=spec.kv_format or KVFormat.MODEL,
        prefix_bytes=spec.prefix_cache_nbytes,
        ranks=device.ranks,
    )
    plan = correct(reckon(facts, device, choice), known)
    if spec.context_length is not None:
        return plan
    for context in shorter_contexts(choice.context_length):
        if plan.need_bytes <= device.budget_bytes:
            break
        plan = correct(reckon(facts, device, replace(choice, context_length=context)), known)
    return plan


def shorter_contexts(context: int) -> Iterator[int]:
    """Yield the powers of two below a context, the longest first, down to the floor."""
    while context > CONTEXT_FLOOR_TOKENS:
        context = 1 << ((context - 1).bit_length() - 1)
        yield context


def correct(plan: Plan, known: tuple[Known, ...]) -> Plan:
    """Return the plan with measured figures in place of the estimates."""
    figures = recall(known, plan.choice.way)
    if figures is None:
        return plan
    measured = figures.over({term.name: term.nbytes for term in plan.terms})
    terms = (
        Term(term.name, measured[term.name], MEASURED) if term.name in measured else term
        for term in plan.terms
    )
    return replace(plan, terms=tuple(terms))
