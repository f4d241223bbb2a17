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

from mlxd_controller.core.measured import Known, Way, recalled
from mlxd_models.fit.facts import ModelFacts
from mlxd_models.sizes.arena_sizes import kv_tokens_bound
from mlxd_models.sizes.cache_sizes import rows_unpacked
from mlxd_models.sizes.packing_on_load import POLICY
from mlxd_models.sizes.pass_sizes import POOL_NBYTES
from mlxd_shared import config
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Weights

__all__ = ["ModelFacts"]

CONTEXT_FLOOR_TOKENS = 256
"""An open context is not shortened further than to this."""

PREFIX_TERM = "prefix"
PROCESS_TERM = "process"
TERMS = ("weights", "kv", PREFIX_TERM, "activations", "pool", PROCESS_TERM)
"""The names of a plan's terms, as errors have them too."""

PROCESS_BYTES = 84 * config.MIB
"""A worker beside its arrays, its tokenizer apart: interpreter, MLX, BLAS, gRPC. Measured with
a model of 0.2 MB, after a stream: 87.8 MB; before it holds a model, 75.6."""
WIDENING_BYTES = 11 * config.MIB
"""NumPy, which a worker needs where weights are widened as they are read. Measured: 11.0 MB."""

HEAP_BYTES = config.OWN_MAPPING_NBYTES
"""What the C heap keeps between blocks that live: larger ones are mappings of their own (0026)."""

CUDA_CONTEXT_BYTES = 600 * config.MIB
"""What the driver keeps of a GPU for each process: context, kernels, workspaces. Measured on one
H200: 518 MiB after a first array, 590 after streams. The process itself is not on the GPU."""

TOKENIZER_FACTOR = 13
"""Of a tokenizer for each byte of its tokenizer.json: 6.8 (GPT-NeoX) to 12.5 (Mistral v3; 0045)."""

MEASURED = "measured"
"""The note of a term that was."""

CONTEXT_USEFUL_TOKENS = 4096
"""Faster weights are not worth a context below this."""

_ITEM_BYTES = {Weights.FLOAT32: 4, Weights.BFLOAT16: 2, Weights.FLOAT16: 2}


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

    @property
    def way(self) -> Way:
        """What measurements hold for."""
        return Way(self.weights, self.context_length, self.rows_max, self.kv_format)


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
    def term_bytes(self) -> tuple[int, ...]:
        """Each term by the order of `TERMS`; their sum is the need."""
        named = {term.name: term.nbytes for term in self.terms}
        return tuple(named.get(name, 0) for name in TERMS)

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


def plan(
    facts: ModelFacts, spec: LoadSpec, device: Device, *, known: tuple[Known, ...] = ()
) -> Plan:
    """Return the best plan for `device` that honours `spec`; the caller compares its need.

    known: what was measured of the model before.

    "Best" is the fastest form of the weights that fits the device's budget, with the longest
    context that does. Where nothing fits, the smallest plan is returned.
    """
    candidates = [_longest(facts, spec, device, weights, known) for weights in _forms(spec, device)]
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
    )
    found = corrected(reckon(facts, device, choice), known)
    if spec.context_length is not None:
        return found
    while found.need_bytes > device.budget_bytes and found.context_length > CONTEXT_FLOOR_TOKENS:
        choice = replace(choice, context_length=power_of_two_below(choice.context_length))
        found = corrected(reckon(facts, device, choice), known)
    return found


def power_of_two_below(number: int) -> int:
    """Return the largest power of two that is less than `number`, at least 2."""
    return 1 << ((number - 1).bit_length() - 1)


def corrected(plan: Plan, known: tuple[Known, ...]) -> Plan:
    """Return the plan with what was measured of such a life in place of what was reckoned."""
    figures = recalled(known, plan.choice.way)
    if figures is None:
        return plan
    measured = figures.over({term.name: term.nbytes for term in plan.terms})
    terms = (
        Term(term.name, measured[term.name], MEASURED) if term.name in measured else term
        for term in plan.terms
    )
    return replace(plan, terms=tuple(terms))


def reckon(facts: ModelFacts, device: Device, choice: Choice) -> Plan:
    """Return the plan with exactly these choices, whether it fits or not."""
    item_bytes = _item_bytes(facts, choice.weights, on_cpu=device.kind == "cpu")
    kv = _kv(facts, choice, item_bytes=item_bytes, on_cpu=device.kind == "cpu")
    beside_bytes = kv.nbytes + (choice.prefix_bytes or 0)
    rest = (
        _weights(facts, choice.weights, item_bytes=item_bytes),
        kv,
        _activations(facts, device, choice, item_bytes=item_bytes, beside_bytes=beside_bytes),
        Term("pool", POOL_NBYTES, "freed memory that is kept for reuse"),
        _process(facts, device, choice),
    )
    free_bytes = device.budget_bytes - sum(term.nbytes for term in rest)
    prefix = _prefix(device, choice, free_bytes=free_bytes)
    return Plan(device.name, choice, (*rest[:2], prefix, *rest[2:]))


def _item_bytes(facts: ModelFacts, weights: Weights, *, on_cpu: bool) -> int:
    """Return what a number takes: beside weights packed while loading 4 bytes on a CPU."""
    if weights in POLICY and on_cpu:
        return _ITEM_BYTES[Weights.FLOAT32]
    return _ITEM_BYTES.get(weights, facts.item_bytes)


def _weights(facts: ModelFacts, weights: Weights, *, item_bytes: int) -> Term:
    if weights is Weights.STORED:
        return Term("weights", facts.stored_bytes - facts.dropped_bytes, "as stored")
    packing = POLICY.get(weights)
    if packing is not None:
        found = facts.packable.get(packing.group_size)
        values = 0 if found is None else found.values
        plain = facts.elements - facts.packed_values - values + facts.packed_scales
        nbytes = packing.nbytes(values, item_bytes) + plain * item_bytes + facts.packed_bytes
        return Term("weights", nbytes, f"{values:,} values packed as {weights.value}")
    nbytes = facts.elements * _ITEM_BYTES[weights]
    return Term("weights", nbytes, f"{facts.elements:,} values as {weights.value}")


def _kv(facts: ModelFacts, choice: Choice, *, item_bytes: int, on_cpu: bool) -> Term:
    context, rows, caches = choice.context_length, choice.rows_max, facts.caches
    held = caches.held(
        context_max=context, rows_max=rows, kv_format=choice.kv_format, on_cpu=on_cpu
    )
    tokens = kv_tokens_bound(context, rows)
    form = "" if choice.kv_format is KVFormat.MODEL else f" as {choice.kv_format.value}"
    parts = [f"{tokens} tokens x {caches.kv_values_per_token} values{form}"]
    parts += [
        f"{layers.kv_values_per_token} values in a window of {layers.window}"
        for layers in caches.windows
    ]
    if caches.recurrent_values_per_row:
        parts.append(f"states of {caches.recurrent_values_per_row} float32 values a row")
    if caches.foreign:
        parts.append("at most: what mlx-lm's layers keep is known when the worker has the model")
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


def _activations(
    facts: ModelFacts, device: Device, choice: Choice, *, item_bytes: int, beside_bytes: int
) -> Term:
    """Widest moment of a pass, or of putting a tensor together while nothing else is there yet.

    Quantised keys and values are unpacked to be read: on Metal one prompt's, elsewhere all rows'.
    Weights that stay packed are unpacked for a prompt, a few layers' at a time.
    """
    context, on_cpu = choice.context_length, device.kind == "cpu"
    nbytes = facts.pass_sizes.nbytes(
        facts.caches,
        context=context,
        rows=choice.rows_max,
        item_nbytes=item_bytes,
        on_cpu=on_cpu,
    )
    read = kv_tokens_bound(context, rows_unpacked(choice.rows_max, device.kind))
    unpacked = facts.caches.unpacked_values(read, choice.kv_format)
    unpacked += facts.unpacked_of(choice.weights)
    nbytes += unpacked * item_bytes
    making = max((it.beyond_in(choice.weights, item_bytes) for it in facts.taken), default=0)
    if making - beside_bytes > nbytes:
        return Term("activations", making - beside_bytes, "putting a tensor together while loading")
    chunk = min(config.PREFILL_CHUNK_TOKENS, context)
    note = f"a prefill of {chunk} tokens against a context of {context}"
    return Term("activations", nbytes, note)


def _process(facts: ModelFacts, device: Device, choice: Choice) -> Term:
    if device.kind == "cuda":
        return Term(PROCESS_TERM, CUDA_CONTEXT_BYTES, "the driver's context of a process")
    nbytes = PROCESS_BYTES + HEAP_BYTES + TOKENIZER_FACTOR * facts.tokenizer_bytes
    if choice.weights is Weights.FLOAT32 and facts.item_bytes < _ITEM_BYTES[choice.weights]:
        nbytes += WIDENING_BYTES
    return Term(PROCESS_TERM, nbytes, "interpreter, libraries, heap and tokenizer")
