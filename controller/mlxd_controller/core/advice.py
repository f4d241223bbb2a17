"""What would make a model fit that does not: each piece of advice was reckoned. Pure.

Invariants:
- Whoever follows one of them, and changes nothing else, has a plan within the device's budget.
- Nothing is said that the model cannot have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from mlxd_models.fit.facts import ModelFacts
from mlxd_models.fit.plan import Choice, Device, Plan
from mlxd_models.fit.planner import CONTEXT_FLOOR_TOKENS, shorter_contexts
from mlxd_models.fit.terms import reckon
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import MIB
from mlxd_shared.domain.requests import KVFormat, Weights
from mlxd_shared.domain.units import format_bytes

_Fits = Callable[[Choice], bool]


def suggestions(
    facts: ModelFacts, chosen: Plan, device: Device, *, room_bytes: int | None = None
) -> tuple[str, ...]:
    """Return what would make a plan that is over the budget fit, for people.

    room_bytes: what there is to fit into; None is the budget, which nobody has any of.

    One change where one is enough, else all of them together, else what memory it takes; nothing
    where that is a matter of waiting.
    """
    choice = chosen.choice
    bound = device.budget_bytes if room_bytes is None else room_bytes

    def fits(changed: Choice) -> bool:
        return reckon(facts, device, changed).least_bytes <= bound

    alone = [
        _context(choice, fits),
        _rows(choice, fits),
        *(_form(changed, fits) for changed in _smaller_weights(facts, choice)),
        _prefix(choice, fits),
        _suggest_packing(facts, choice, fits),
    ]
    advices = tuple(advice for advice in alone if advice is not None)
    if advices:
        return advices
    together = _together(facts, choice, fits)
    if together is not None:
        return (together,)
    if room_bytes is not None:
        return ()
    if (
        chosen.need_bytes <= device.total_bytes - device.reserve_bytes
    ):  # an operator's limit is less
        ranks_on_one = max(device.parts.values())
        limit = f"{math.ceil(chosen.need_bytes * ranks_on_one / MIB)}M"
        return (f"a memory limit of {limit} (`mlxd serve --memory-limit {limit}`)",)
    need = format_bytes(chosen.need_bytes)
    if len(device.parts) > 1:
        return (f"a machine with {need} for models on each of {chosen.ranks} devices",)
    return (f"a machine with {need} for models",)


def _context(choice: Choice, fits: _Fits) -> str | None:
    for context in shorter_contexts(choice.context_length):
        if fits(replace(choice, context_length=context)):
            return f"a context of {context} tokens"
    return None


def _rows(choice: Choice, fits: _Fits) -> str | None:
    """Return the most rows that fit; a search, since more rows never need less."""
    few, many = 0, choice.rows_max
    while many - few > 1:
        middle = (few + many) // 2
        if fits(replace(choice, rows_max=middle)):
            few = middle
        else:
            many = middle
    if not few:
        return None
    return "one stream at a time (rows_max 1)" if few == 1 else f"{few} streams (rows_max {few})"


def _smaller_weights(facts: ModelFacts, choice: Choice) -> list[Choice]:
    """Return the choice with the weights in each form that takes less."""
    if choice.weights is not Weights.FLOAT32:
        return []
    smaller = facts.stored_bytes - facts.dropped_bytes < FloatType.F32.nbytes * facts.elements
    stored = [replace(choice, weights=Weights.STORED)] if smaller else []
    return [*stored, replace(choice, weights=Weights.BFLOAT16)]


def _form(changed: Choice, fits: _Fits) -> str | None:
    if not fits(changed):
        return None
    stored = changed.weights is Weights.STORED
    return "weights as stored" if stored else f"weights as {changed.weights.value}"


def _prefix(choice: Choice, fits: _Fits) -> str | None:
    if choice.prefix_bytes and fits(replace(choice, prefix_bytes=None)):
        return "a smaller prefix cache"
    return None


def _kv_formats(facts: ModelFacts, choice: Choice) -> list[KVFormat]:
    """Return the smaller formats that the model's heads allow, the larger one first."""
    smaller = {KVFormat.MODEL: [KVFormat.Q8, KVFormat.Q4], KVFormat.Q8: [KVFormat.Q4]}
    wanted = smaller.get(choice.kv_format, [])
    return [form for form in wanted if facts.caches.kv_format_problem(form) is None]


def _suggest_packing(facts: ModelFacts, choice: Choice, fits: _Fits) -> str | None:
    for form in _kv_formats(facts, choice):
        if fits(replace(choice, kv_format=form)):
            bits = 8 if form is KVFormat.Q8 else 4
            return f"keys and values in {bits} bits (kv_format {form.value})"
    return None


def _smallest(facts: ModelFacts, choice: Choice) -> Choice:
    """Return the choice with everything that can be smaller as small as it can be."""
    weights = _smaller_weights(facts, choice)
    formats = _kv_formats(facts, choice)
    return replace(
        choice,
        weights=weights[0].weights if weights else choice.weights,
        rows_max=1,
        kv_format=formats[-1] if formats else choice.kv_format,
        prefix_bytes=None,
        context_length=min(choice.context_length, CONTEXT_FLOOR_TOKENS),
    )


def _together(facts: ModelFacts, choice: Choice, fits: _Fits) -> str | None:
    """Return all changes at once, with the longest context that they leave; None if even so not."""
    smallest = _smallest(facts, choice)
    if not fits(smallest):
        return None
    contexts = (choice.context_length, *shorter_contexts(choice.context_length))
    context = next(c for c in contexts if fits(replace(smallest, context_length=c)))
    parts = [f"a context of {context} tokens", "one stream at a time (rows_max 1)"]
    if smallest.weights is not choice.weights:
        parts.append(f"weights {smallest.weights.value}")
    if smallest.kv_format is not choice.kv_format:
        parts.append(f"kv_format {smallest.kv_format.value}")
    return f"{', '.join(parts)}, all together"
