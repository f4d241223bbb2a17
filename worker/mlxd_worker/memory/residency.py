"""How the weights live in memory: the fastest form that fits, as a sum with a name per term.

Invariants:
- Pure: sizes in, a plan out. No MLX, no files, no clock.
- The total is the sum of the terms. A form that the user forces is the only one considered.
- On a CPU float32 is 10 to 400 times faster than any other form, where products of half precision
  are scalar loops; elsewhere weights live as they are stored.
"""

from dataclasses import dataclass
from enum import StrEnum

from mlxd_shared.units import format_bytes

POOL_NBYTES = 32 << 20
"""What MLX keeps of freed buffers for reuse."""


class FloatType(StrEnum):
    """A floating-point form, by its name in safetensors headers."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is FloatType.F32 else 2


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


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model takes, in values (to be multiplied by the bytes of a form)."""

    weight_values: int
    stored: FloatType
    kv_values: int
    """Keys and values that must fit beside the weights."""
    activation_values: int
    """The widest moment of one prefill chunk."""
    logits_values: int
    """Float32 whatever the form."""


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of the sum."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """The form the weights take, what it adds up to, and why."""

    form: FloatType
    terms: tuple[Term, ...]
    budget_nbytes: int
    reason: str

    @property
    def total_nbytes(self) -> int:
        """Sum of the terms."""
        return sum(term.nbytes for term in self.terms)

    @property
    def fits(self) -> bool:
        """Whether the sum is within the budget."""
        return self.total_nbytes <= self.budget_nbytes


def plan_residency(
    demand: Demand, *, device: DeviceKind, choice: WeightsChoice, budget_nbytes: int
) -> ResidencyPlan:
    """Return the plan; where nothing fits, the smallest considered, with `fits` false."""
    if choice is not WeightsChoice.AUTO:
        form = demand.stored if choice is WeightsChoice.STORED else FloatType(choice.upper())
        return _plan(demand, form, budget_nbytes, f"{form} because the user chose {choice}")
    if device is not DeviceKind.CPU:
        return _plan(demand, demand.stored, budget_nbytes, f"{demand.stored}, as stored")
    fast = _plan(demand, FloatType.F32, budget_nbytes, "F32, the fastest form on a CPU")
    if fast.fits or demand.stored is FloatType.F32:
        return fast
    need, have = format_bytes(fast.total_nbytes), format_bytes(budget_nbytes)
    reason = f"{demand.stored}, as stored: F32 would need {need} of {have}"
    return _plan(demand, demand.stored, budget_nbytes, reason)


def activation_values(*, chunk_tokens: int, span: int, heads: int, per_token: int) -> int:
    """Return the values alive at once in a prefill chunk, attention scores (unfused) included."""
    # The scores exist twice, before and after the softmax.
    return chunk_tokens * (per_token + 2 * heads * span)


def _plan(demand: Demand, form: FloatType, budget_nbytes: int, reason: str) -> ResidencyPlan:
    terms = (
        Term("weights", demand.weight_values * form.nbytes),
        Term("kv", demand.kv_values * form.nbytes),
        Term("activations", demand.activation_values * form.nbytes),
        Term("logits", demand.logits_values * FloatType.F32.nbytes),
        Term("pool", POOL_NBYTES),
    )
    return ResidencyPlan(form=form, terms=terms, budget_nbytes=budget_nbytes, reason=reason)
