"""Fit as a sum with a name per term, from facts that headers and config.json state. Pure.

Invariants:
- A plan's need is the sum of its terms, nothing else; each term says how it was reckoned.
- What was asked for is never changed: a context that was asked for and does not fit is reported as
  not fitting. Only what was left open is chosen, and the choice stands in the plan.
- An open prefix cache gives way first, down to nothing, before a context is shortened or another
  form taken, and before anybody is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxd_shared import config
from mlxd_shared.arena_sizes import kv_tokens_bound
from mlxd_shared.cache_sizes import CacheSizes
from mlxd_shared.requests import KVFormat, LoadSpec, Weights
from mlxd_shared.units import format_bytes

CONTEXT_FLOOR_TOKENS = 256
"""An open context is not shortened further than to this."""

PREFIX_TERM = "prefix"
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
    unpacked_values: int = 0
    """The most values of packed weights that are unpacked at once, where they stay packed."""


@dataclass(frozen=True, slots=True)
class Device:
    """One memory: `budget_bytes` is what mlxd may ever use of it, after the reserve.

    `name` tells it from the machine's others, and is what a plan names. A GPU has an `id` of its
    own, by which it is made visible to a worker, and is of a `product`.

    `usable_bytes`, at most the budget, leaves out what other programs hold now. `prefix_fraction`
    of the budget is what one model keeps of former prompts, where nobody says. `held_bytes` is what
    workers were measured to hold; 0 where only they can tell.
    """

    name: str
    kind: str
    total_bytes: int
    reserve_bytes: int
    budget_bytes: int
    usable_bytes: int
    prefix_fraction: float = config.PREFIX_MEMORY_FRACTION
    held_bytes: int = 0
    id: str = ""
    product: str = ""


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of a need."""

    name: str
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Choice:
    """How a model is to live. `prefix_bytes` None leaves the prefix cache open."""

    weights: Weights
    context_length: int
    rows_max: int
    kv_format: KVFormat
    prefix_bytes: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model would live on a device, and what that needs."""

    device: str
    choice: Choice
    terms: tuple[Term, ...]

    @property
    def weights(self) -> Weights:
        """The form of the weights."""
        return self.choice.weights

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self.choice.context_length

    @property
    def rows_max(self) -> int:
        """Streams decoded side by side."""
        return self.choice.rows_max

    @property
    def kv_format(self) -> KVFormat:
        """The form of keys and values."""
        return self.choice.kv_format

    @property
    def prefix_bytes(self) -> int:
        """What snapshots of former prompts may take."""
        return sum(term.nbytes for term in self.terms if term.name == PREFIX_TERM)

    @property
    def need_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.nbytes for term in self.terms)

    @property
    def least_bytes(self) -> int:
        """The need without what may be given up: an open prefix cache."""
        return self.need_bytes - (self.prefix_bytes if self.choice.prefix_bytes is None else 0)

    @property
    def arrays_bytes(self) -> int:
        """The need but for the process itself: what MLX is to hold at most."""
        return sum(term.nbytes for term in self.terms if term.name != PROCESS_TERM)

    def within(self, room_bytes: int) -> Plan:
        """Return the plan with as much of an open prefix cache as fits into `room_bytes`."""
        spare = max(0, room_bytes - self.least_bytes)
        if self.choice.prefix_bytes is not None or self.prefix_bytes <= spare:
            return self
        shrunk = Term(PREFIX_TERM, spare, "what is left of the memory that is free")
        terms = (shrunk if term.name == PREFIX_TERM else term for term in self.terms)
        return replace(self, terms=tuple(terms))


def plan(facts: ModelFacts, spec: LoadSpec, device: Device) -> Plan:
    """Return the best plan for `device` that honours `spec`; the caller compares its need.

    "Best" is the fastest form of the weights that fits the device's budget, with the longest
    context that does. Where nothing fits, the smallest plan is returned.
    """
    candidates = [_longest(facts, spec, device, weights) for weights in _forms(spec, device)]
    enough = min(facts.context_length_max, CONTEXT_USEFUL_TOKENS)
    for candidate in candidates:
        fits = candidate.need_bytes <= device.budget_bytes
        if fits and (spec.context_length is not None or candidate.context_length >= enough):
            return candidate
    return min(candidates, key=lambda candidate: candidate.least_bytes)


def _forms(spec: LoadSpec, device: Device) -> tuple[Weights, ...]:
    if spec.weights is not Weights.AUTO:
        return (spec.weights,)
    # Products of quantised and 16-bit weights are scalar loops on a CPU: 10 to 400 times slower.
    return (Weights.FLOAT32, Weights.STORED) if device.kind == "cpu" else (Weights.STORED,)


def _longest(facts: ModelFacts, spec: LoadSpec, device: Device, weights: Weights) -> Plan:
    choice = Choice(
        weights=weights,
        context_length=spec.context_length or facts.context_length_max,
        rows_max=spec.rows_max or config.ROWS_MAX_DEFAULT,
        kv_format=spec.kv_format or KVFormat.MODEL,
        prefix_bytes=spec.prefix_cache_nbytes,
    )
    found = reckon(facts, device, choice)
    if spec.context_length is not None:
        return found
    while found.need_bytes > device.budget_bytes and found.context_length > CONTEXT_FLOOR_TOKENS:
        choice = replace(choice, context_length=_power_of_two_below(choice.context_length))
        found = reckon(facts, device, choice)
    return found


def _power_of_two_below(number: int) -> int:
    return 1 << ((number - 1).bit_length() - 1)


def reckon(facts: ModelFacts, device: Device, choice: Choice) -> Plan:
    """Return the plan with exactly these choices, whether it fits or not."""
    item_bytes = _ITEM_BYTES.get(choice.weights, facts.item_bytes)
    activations = _activations(facts, choice, item_bytes=item_bytes, on_cpu=device.kind == "cpu")
    rest = (
        _weights(facts, choice.weights),
        _kv(facts, choice, item_bytes=item_bytes),
        activations,
        Term(
            "pool",
            int(activations.nbytes * POOL_FRACTION),
            f"{POOL_FRACTION:.0%} of the activations, kept for reuse",
        ),
        Term(PROCESS_TERM, PROCESS_BYTES, "interpreter and libraries"),
    )
    free_bytes = device.budget_bytes - sum(term.nbytes for term in rest)
    prefix = _prefix(device, choice, free_bytes=free_bytes)
    return Plan(device.name, choice, (*rest[:2], prefix, *rest[2:]))


def _weights(facts: ModelFacts, weights: Weights) -> Term:
    if weights is Weights.STORED:
        return Term("weights", facts.stored_bytes, "as stored")
    nbytes = facts.elements * _ITEM_BYTES[weights]
    return Term("weights", nbytes, f"{facts.elements:,} values as {weights.value}")


def _kv(facts: ModelFacts, choice: Choice, *, item_bytes: int) -> Term:
    context, rows, caches = choice.context_length, choice.rows_max, facts.caches
    held = caches.held(context_max=context, rows_max=rows, kv_format=choice.kv_format)
    tokens = kv_tokens_bound(context, rows)
    form = "" if choice.kv_format is KVFormat.MODEL else f" as {choice.kv_format.value}"
    parts = [f"{tokens} tokens x {caches.kv_values_per_token} values{form}"]
    parts += [
        f"{layers.kv_values_per_token} values in a window of {layers.window}"
        for layers in caches.windows
    ]
    if caches.recurrent_values_per_row:
        parts.append(f"states of {caches.recurrent_values_per_row} float32 values a row")
    return Term("kv", held.nbytes(item_bytes), ", ".join(parts))


def _prefix(device: Device, choice: Choice, *, free_bytes: int) -> Term:
    if choice.prefix_bytes is not None:
        note = "as asked for" if choice.prefix_bytes else "no prefix is to be kept"
        return Term(PREFIX_TERM, choice.prefix_bytes, note)
    wanted = int(device.budget_bytes * device.prefix_fraction)
    note = f"{device.prefix_fraction:.0%} of the device's memory"
    if wanted <= free_bytes:
        return Term(PREFIX_TERM, wanted, note)
    return Term(PREFIX_TERM, max(0, free_bytes), f"what is left of {note}")


def _activations(facts: ModelFacts, choice: Choice, *, item_bytes: int, on_cpu: bool) -> Term:
    """Widest moment of one chunk: residual, norm, projections, the MLP, scores, logits.

    Quantised keys and values are unpacked to be read: on a CPU all rows', elsewhere one prompt's.
    Weights that stay packed are unpacked for a prompt, a few layers' at a time.
    """
    context = choice.context_length
    chunk = min(config.PREFILL_CHUNK_TOKENS, context)
    wide = 3 * facts.hidden_size + facts.projected_values + 3 * facts.intermediate_size
    scores = 2 * facts.heads * context
    read = kv_tokens_bound(context, choice.rows_max if on_cpu else 1)
    values = chunk * (wide + scores) + facts.caches.unpacked_values(read, choice.kv_format)
    values += facts.unpacked_values if choice.weights is Weights.STORED else 0
    nbytes = values * item_bytes + 4 * config.ROWS_MAX_DEFAULT * facts.vocab_size
    note = f"a prefill of {chunk} tokens against a context of {context}"
    return Term("activations", nbytes, note)


def suggestions(facts: ModelFacts, chosen: Plan, device: Device) -> tuple[str, ...]:
    """Return what would make a plan that is over the budget fit, for people; each was reckoned."""
    found: list[str] = []
    choice = chosen.choice

    def fits(changed: Choice) -> bool:
        return reckon(facts, device, changed).need_bytes <= device.budget_bytes

    context = choice.context_length
    while context > CONTEXT_FLOOR_TOKENS:
        context = _power_of_two_below(context)
        if fits(replace(choice, context_length=context)):
            found.append(f"a context of {context} tokens")
            break
    if choice.rows_max > 1 and fits(replace(choice, rows_max=1)):
        found.append("one stream at a time (rows_max 1)")
    if choice.weights is Weights.FLOAT32 and fits(replace(choice, weights=Weights.STORED)):
        found.append("weights as stored")
    if choice.prefix_bytes and fits(replace(choice, prefix_bytes=None)):
        found.append("a smaller prefix cache")
    packed = _packed(facts, choice)
    if packed is not None and fits(packed):
        found.append("keys and values in 8 bits (kv_format q8)")
    if not found:
        found.append(f"a machine with {format_bytes(chosen.need_bytes)} for models")
    return tuple(found)


def _packed(facts: ModelFacts, choice: Choice) -> Choice | None:
    """Return the choice with quantised keys and values, where the model's heads allow it."""
    if choice.kv_format is not KVFormat.MODEL or facts.caches.kv_format_problem(KVFormat.Q8):
        return None
    return replace(choice, kv_format=KVFormat.Q8)
