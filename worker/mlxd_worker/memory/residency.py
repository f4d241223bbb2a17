"""How a model lives in memory: the fastest form that fits, as a sum with a name per term.

Invariants:
- Pure: sizes in, a plan out. No MLX, no files, no clock.
- The total is the sum of the terms. A form or a context that the user forces is the only one
  considered.
- An open prefix cache takes its share of what is left, down to nothing: it shortens no context.
- On a CPU float32 is 10 to 400 times faster than any other form, where products of half precision
  are scalar loops; elsewhere weights live as they are stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlxd_models.sizes.cache_sizes import Held
from mlxd_models.sizes.pass_sizes import POOL_NBYTES
from mlxd_models.sizes.weight_forms import FloatType, Packed
from mlxd_shared import config
from mlxd_shared.domain.units import format_bytes

PREFIX_TERM = "prefix"
POOL_TERM = "pool"
KV_TERM = "kv"

CONTEXT_FLOOR_TOKENS = 256
"""An open context is not shortened further than to this."""

CONTEXT_USEFUL_TOKENS = 4096
"""Faster weights are not worth a context below this; the controller reckons with the same."""


class DeviceKind(StrEnum):
    """What runs the products."""

    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


class WeightsChoice(StrEnum):
    """What the user asked for; AUTO leaves it to the plan."""

    AUTO = "auto"
    STORED = "stored"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    PACKED = "packed"
    """Packed while they are loaded."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model takes, in values (to be multiplied by a form's bytes) where not in bytes."""

    weight_values: int
    """All weights, unpacked."""
    stored: FloatType
    caches: Held
    """What rows remember, which must fit beside the weights."""
    pass_nbytes: Callable[[int], int]
    """The widest moment of a pass, by the bytes of a value in the form."""
    packed: Packed | None = None
    """None where no weights are stored packed."""


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of the sum."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """The form the weights take, what it adds up to, and why."""

    form: FloatType
    context_length: int
    terms: tuple[Term, ...]
    budget_nbytes: int
    reason: str
    packed: bool = False
    """Whether weights that are stored packed stay so; `form` is then what their scales become."""

    @property
    def prefix_cache_nbytes(self) -> int:
        """What snapshots of former prompts may take."""
        return self.nbytes_of(PREFIX_TERM)

    def nbytes_of(self, name: str) -> int:
        """Return what the terms of one name take."""
        return sum(term.nbytes for term in self.terms if term.name == name)

    @property
    def arrays_nbytes(self) -> int:
        """What MLX is to hold at most, but for its pool."""
        return self.total_nbytes - self.nbytes_of(POOL_TERM)

    @property
    def total_nbytes(self) -> int:
        """Sum of the terms."""
        return sum(term.nbytes for term in self.terms)

    @property
    def fits(self) -> bool:
        """Whether the sum is within the budget."""
        return self.total_nbytes <= self.budget_nbytes


def plan_residency(
    demand_at: Callable[[int], Demand],
    *,
    contexts: Sequence[int],
    device: DeviceKind,
    choice: WeightsChoice,
    budget_nbytes: int,
    prefix_cache_nbytes: int | None = None,
) -> ResidencyPlan:
    """Return the plan: the fastest form that fits, with the longest of `contexts` that does.

    demand_at: what the model takes with a context of so many tokens. contexts: longest first.
    prefix_cache_nbytes: None leaves it open. Where no form fits with a useful context, the smallest
    plan considered, with or without `fits`.
    """
    useful = min(contexts[0], CONTEXT_USEFUL_TOKENS)
    plans: list[ResidencyPlan] = []
    for form, packed, reason in _forms(demand_at(contexts[0]), device, choice):
        so_far = f"; {plans[-1].form} would need {_need(plans[-1])}" if plans else ""
        for context in contexts:
            terms = _terms(demand_at(context), form, packed=packed)
            terms = _with_prefix(terms, budget_nbytes, prefix_cache_nbytes)
            plan = ResidencyPlan(form, context, terms, budget_nbytes, reason + so_far, packed)
            if plan.fits:
                break
        if plan.fits and plan.context_length >= useful:
            return plan
        plans.append(plan)
    return min(plans, key=lambda plan: plan.total_nbytes - plan.prefix_cache_nbytes)


def open_contexts(context_max: int) -> tuple[int, ...]:
    """Return the contexts to try where none was asked for: the model's, then powers of two."""
    contexts = [context_max]
    while contexts[-1] > CONTEXT_FLOOR_TOKENS:
        contexts.append(1 << ((contexts[-1] - 1).bit_length() - 1))
    return tuple(contexts)


def _forms(
    demand: Demand, device: DeviceKind, choice: WeightsChoice
) -> tuple[tuple[FloatType, bool, str], ...]:
    """Return the forms to consider, fastest first: whether packed, and why it would be taken."""
    stored, packed = demand.stored, demand.packed is not None
    as_stored = (stored, packed, f"{'packed' if packed else stored}, as stored")
    if choice is WeightsChoice.STORED:
        return ((stored, packed, f"{as_stored[2]}, because the user chose {choice}"),)
    if choice is WeightsChoice.PACKED:
        # Beside packed weights, too, what is multiplied is fastest in float32 on a CPU.
        form = FloatType.F32 if device is DeviceKind.CPU else stored
        return ((form, True, "packed while loading, because the user chose it"),)
    if choice is not WeightsChoice.AUTO:
        form = FloatType(choice.upper())
        return ((form, False, f"{form} because the user chose {choice}"),)
    if device is not DeviceKind.CPU:
        return (as_stored,)
    fastest = (FloatType.F32, False, "F32, the fastest form on a CPU")
    return (fastest,) if stored is FloatType.F32 and not packed else (fastest, as_stored)


def _need(plan: ResidencyPlan) -> str:
    need, have = format_bytes(plan.total_nbytes), format_bytes(plan.budget_nbytes)
    return f"{need} of {have} for {plan.context_length} tokens"


def _terms(demand: Demand, form: FloatType, *, packed: bool) -> tuple[Term, ...]:
    weights_nbytes, unpacked = demand.weight_values * form.nbytes, 0
    if packed and demand.packed is not None:
        weights_nbytes = demand.packed.kept_nbytes + demand.packed.values * form.nbytes
        unpacked = demand.packed.unpacked_values
    return (
        Term("weights", weights_nbytes),
        Term(KV_TERM, demand.caches.nbytes(form.nbytes)),
        Term("activations", demand.pass_nbytes(form.nbytes) + unpacked * form.nbytes),
        Term(POOL_TERM, POOL_NBYTES),
    )


def _with_prefix(
    terms: tuple[Term, ...], budget_nbytes: int, asked_nbytes: int | None
) -> tuple[Term, ...]:
    """Return the terms with what was asked for, or the default share of what is left."""
    nbytes = asked_nbytes
    if nbytes is None:
        left = budget_nbytes - sum(term.nbytes for term in terms)
        nbytes = max(0, min(int(budget_nbytes * config.PREFIX_MEMORY_FRACTION), left))
    return (*terms, Term(PREFIX_TERM, nbytes))
