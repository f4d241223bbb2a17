"""Fit as a sum with a name per term, from facts that headers and config.json state. Pure.

Invariants:
- A plan's need is the sum of its terms, nothing else; each term says how it was reckoned.
- What was asked for is never changed: a context that was asked for and does not fit is reported as
  not fitting. Only what was left open is chosen, and the choice stands in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_shared import config
from mlxd_shared.cache_sizes import CacheSizes
from mlxd_shared.requests import LoadSpec, Weights
from mlxd_shared.units import format_bytes

KV_CLASS_TOKENS = 256
"""A row's keys and values are allotted in multiples of this many tokens."""

PROCESS_TERM = "process"
PROCESS_BYTES = 96 * config.MIB
"""A worker before it holds a model: interpreter, MLX, BLAS, gRPC, tokenizer."""

POOL_FRACTION = 0.5
"""Freed buffers that MLX keeps for reuse, as a part of the activations that they once held."""

CONTEXT_USEFUL_TOKENS = 4096
"""Faster weights are not worth a context below this."""

_ITEM_BYTES = {Weights.FLOAT32: 4, Weights.BFLOAT16: 2, Weights.FLOAT16: 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's headers and config.json say about its size.

    `stored_bytes` is the tensors' size on disk, `elements` their number once dequantised,
    `item_bytes` the size of one stored floating-point value, `projected_values` what the widest
    layer makes of one position's input, such as queries, keys and values.
    """

    architecture: str
    stored_bytes: int
    elements: int
    item_bytes: int
    heads: int
    caches: CacheSizes
    projected_values: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length_max: int


@dataclass(frozen=True, slots=True)
class Device:
    """One memory: `budget_bytes` is what mlxd may ever use of it, after the reserve.

    `usable_bytes`, at most the budget, leaves out what other programs hold now.
    """

    name: str
    kind: str
    total_bytes: int
    reserve_bytes: int
    budget_bytes: int
    usable_bytes: int


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of a need."""

    name: str
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model would live on a device, and what that needs."""

    device: str
    weights: Weights
    context_length: int
    rows_max: int
    terms: tuple[Term, ...]

    @property
    def need_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.nbytes for term in self.terms)

    @property
    def arrays_bytes(self) -> int:
        """The need but for the process itself: what MLX is to hold at most."""
        return sum(term.nbytes for term in self.terms if term.name != PROCESS_TERM)


def plan(facts: ModelFacts, spec: LoadSpec, device: Device) -> Plan:
    """Return the best plan for `device` that honours `spec`; the caller compares its need.

    "Best" is the fastest form of the weights that fits the device's budget, with the longest
    context that does. Where nothing fits, the smallest plan is returned.
    """
    rows_max = spec.rows_max or config.ROWS_MAX_DEFAULT
    candidates = [
        _longest(facts, spec, device, weights=weights, rows_max=rows_max)
        for weights in _forms(spec, device)
    ]
    enough = min(facts.context_length_max, CONTEXT_USEFUL_TOKENS)
    for candidate in candidates:
        fits = candidate.need_bytes <= device.budget_bytes
        if fits and (spec.context_length is not None or candidate.context_length >= enough):
            return candidate
    return min(candidates, key=lambda candidate: candidate.need_bytes)


def _forms(spec: LoadSpec, device: Device) -> tuple[Weights, ...]:
    if spec.weights is not Weights.AUTO:
        return (spec.weights,)
    # Products of quantised and 16-bit weights are scalar loops on a CPU: 10 to 400 times slower.
    return (Weights.FLOAT32, Weights.STORED) if device.kind == "cpu" else (Weights.STORED,)


def _longest(
    facts: ModelFacts, spec: LoadSpec, device: Device, *, weights: Weights, rows_max: int
) -> Plan:
    if spec.context_length is not None:
        return reckon(facts, device, weights=weights, context=spec.context_length, rows=rows_max)
    context = facts.context_length_max
    found = reckon(facts, device, weights=weights, context=context, rows=rows_max)
    while found.need_bytes > device.budget_bytes and context > KV_CLASS_TOKENS:
        context = _power_of_two_below(context)
        found = reckon(facts, device, weights=weights, context=context, rows=rows_max)
    return found


def _power_of_two_below(number: int) -> int:
    return 1 << ((number - 1).bit_length() - 1)


def reckon(facts: ModelFacts, device: Device, *, weights: Weights, context: int, rows: int) -> Plan:
    """Return the plan with exactly these choices, whether it fits or not."""
    item_bytes = _ITEM_BYTES.get(weights, facts.item_bytes)
    chunk = min(config.PREFILL_CHUNK_TOKENS, context)
    activations = _activations(facts, item_bytes=item_bytes, chunk=chunk, context=context)
    terms = (
        _weights(facts, weights),
        _kv(facts, item_bytes=item_bytes, context=context, rows=rows),
        Term("prefix", 0, "no prefix is kept between requests"),
        activations,
        Term(
            "pool",
            int(activations.nbytes * POOL_FRACTION),
            f"{POOL_FRACTION:.0%} of the activations, kept for reuse",
        ),
        Term(PROCESS_TERM, PROCESS_BYTES, "interpreter and libraries"),
    )
    return Plan(device.name, weights, context, rows, terms)


def _weights(facts: ModelFacts, weights: Weights) -> Term:
    if weights is Weights.STORED:
        return Term("weights", facts.stored_bytes, "as stored")
    nbytes = facts.elements * _ITEM_BYTES[weights]
    return Term("weights", nbytes, f"{facts.elements:,} values as {weights.value}")


def _kv(facts: ModelFacts, *, item_bytes: int, context: int, rows: int) -> Term:
    capacity = -(-context // KV_CLASS_TOKENS) * KV_CLASS_TOKENS
    values = facts.caches.kv_values_per_token
    nbytes = capacity * rows * values * item_bytes
    note = f"{capacity} tokens x {rows} rows x {values} values x {item_bytes} bytes"
    return Term("kv", nbytes, note)


def _activations(facts: ModelFacts, *, item_bytes: int, chunk: int, context: int) -> Term:
    """Widest moment of one chunk: residual, norm, projections, the MLP, scores, logits."""
    wide = 3 * facts.hidden_size + facts.projected_values + 3 * facts.intermediate_size
    scores = 2 * facts.heads * context
    nbytes = chunk * (wide + scores) * item_bytes + 4 * config.ROWS_MAX_DEFAULT * facts.vocab_size
    note = f"a prefill of {chunk} tokens against a context of {context}"
    return Term("activations", nbytes, note)


def suggestions(facts: ModelFacts, chosen: Plan, device: Device) -> tuple[str, ...]:
    """Return what would make a plan that is over the budget fit, for people; each was reckoned."""
    found: list[str] = []
    context = chosen.context_length
    while context > KV_CLASS_TOKENS:
        context = _power_of_two_below(context)
        if _fits(facts, chosen, device, context=context):
            found.append(f"a context of {context} tokens")
            break
    if chosen.rows_max > 1 and _fits(facts, chosen, device, rows=1):
        found.append("one stream at a time (rows_max 1)")
    if chosen.weights is Weights.FLOAT32 and _fits(facts, chosen, device, weights=Weights.STORED):
        found.append("weights as stored")
    if not found:
        found.append(f"a machine with {format_bytes(chosen.need_bytes)} for models")
    return tuple(found)


def _fits(
    facts: ModelFacts,
    chosen: Plan,
    device: Device,
    *,
    context: int | None = None,
    rows: int | None = None,
    weights: Weights | None = None,
) -> bool:
    changed = reckon(
        facts,
        device,
        weights=weights or chosen.weights,
        context=context or chosen.context_length,
        rows=rows or chosen.rows_max,
    )
    return changed.need_bytes <= device.budget_bytes
