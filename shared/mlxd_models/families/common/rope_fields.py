"""The rotary part of config.json: which kinds of scaling are understood.

Invariants:
- A kind of scaling is honoured or refused by name: an ignored one gives fluent nonsense far out.
"""

import math
from dataclasses import replace

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.rope import Llama3Scaling, LongScaling, RopeConfig
from mlxd_models.families.common.rope_kinds import YarnScaling
from mlxd_shared.config import CONTEXT_LENGTH_LIMIT

ROPE_BASE_DEFAULT = 10_000.0
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
BETA_FAST_DEFAULT = 32.0
BETA_SLOW_DEFAULT = 1.0
PAIRS_MAX = 1 << 12
"""The most factors of single pairs that are read."""

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 2.0**127
"""What is smaller has lost digits there, or is 0; what is larger may be infinite."""

KINDS_OF_LAYERS = frozenset({"full_attention", "sliding_attention", "linear_attention"})
_ORIGINAL = "original_max_position_embeddings"


def parse_rope(fields: Fields) -> RopeConfig:
    """Return the rotary part of a config.

    Both spellings are read: `rope_scaling` beside `rope_theta`, and `rope_parameters` for both.

    Raises:
        InvalidModel: an unsupported kind, or a wrong or missing parameter of a supported one.
    """
    scaling, key = _scaling(fields)
    base = fields.positive("rope_theta", default=ROPE_BASE_DEFAULT)
    plain = RopeConfig(
        base=scaling.positive("rope_theta", default=base),
        interleaved=fields.flag("rope_traditional", default=False),
    )
    partial = scaling.positive("partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise scaling.error("partial_rotary_factor", f"{partial} is not supported, only 1")
    nested = next((key for key in scaling.values if key in KINDS_OF_LAYERS), None)
    if nested is not None:
        raise scaling.error(nested, "rotations by kind of layer are not supported here")
    kind_key, kind = _kind(scaling)
    if kind is None and scaling.has("factor"):
        raise fields.error(key, "has a factor but no rope_type")
    match kind:
        case None | "default":
            return plain
        case "linear":
            return replace(plain, position_scale=1.0 / scaling.positive("factor"))
        case "llama3":
            return replace(plain, scaling=_llama3(fields, scaling))
        case "yarn":
            return replace(plain, scaling=_yarn(fields, scaling, base=plain.base))
        case "dynamic":
            # It acts on positions beyond `max_position_embeddings`, which no row ever has.
            scaling.positive("factor")
            return plain
        case "longrope":
            return replace(plain, scaling=_long(fields, scaling))
    supported = ", ".join(ROPE_KINDS)
    raise scaling.error(kind_key, f"{kind!r} is not supported; {supported} are")


def _scaling(fields: Fields) -> tuple[Fields, str]:
    both = [key for key in ("rope_scaling", "rope_parameters") if fields.has(key)]
    if len(both) == 2 and fields.values[both[0]] != fields.values[both[1]]:
        raise fields.error("rope_scaling", "contradicts rope_parameters")
    if not both:
        return Fields({}, "rope_scaling."), "rope_scaling"
    return fields.part(both[0]), both[0]


def _llama3(fields: Fields, scaling: Fields) -> Llama3Scaling:
    low = scaling.positive("low_freq_factor")
    high = scaling.positive("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high} is not above low_freq_factor {low}")
    return Llama3Scaling(
        factor=scaling.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_original_context(fields, scaling),
    )


def _yarn(fields: Fields, scaling: Fields, *, base: float) -> YarnScaling:
    factor = scaling.positive("factor")
    if factor < 1.0:
        raise scaling.error("factor", f"{factor} is below 1")
    if base <= 1.0:
        raise scaling.error("rope_theta", f"{base} is not above 1")
    fast = scaling.positive("beta_fast", default=BETA_FAST_DEFAULT)
    slow = scaling.positive("beta_slow", default=BETA_SLOW_DEFAULT)
    if fast < slow:
        raise scaling.error("beta_fast", f"{fast} is below beta_slow {slow}")
    return YarnScaling(
        factor=factor,
        original_context=_original_context(fields, scaling),
        beta_fast=fast,
        beta_slow=slow,
        gain=_yarn_gain(scaling, factor),
        truncate=scaling.flag("truncate", default=True),
    )


def _yarn_gain(scaling: Fields, factor: float) -> float:
    """Return `attention_factor`, or what follows from the factor: by two weights where both are."""
    if scaling.has("attention_factor"):
        return scaling.positive("attention_factor")
    stated = [_weight_of_gain(scaling, key) for key in ("mscale", "mscale_all_dim")]
    over, under = stated if all(stated) else (1.0, 0.0)
    grown = math.log(factor) / 10
    return (1.0 + over * grown) / (1.0 + under * grown)


def _weight_of_gain(scaling: Fields, key: str) -> float:
    """Return a number from 0 up; 0 where the key is absent."""
    if scaling.values.get(key) in (None, 0):
        return 0.0
    return scaling.positive(key)


def _long(fields: Fields, scaling: Fields) -> LongScaling:
    for key in ("short_mscale", "long_mscale"):
        if scaling.has(key):
            raise scaling.error(key, "is not supported, and readers differ in what it means")
    context = fields.integer("max_position_embeddings", low=1, high=CONTEXT_LENGTH_LIMIT)
    original = _original_context(fields, scaling)
    if scaling.has("attention_factor"):
        gain = scaling.positive("attention_factor")
    else:
        factor = scaling.positive("factor", default=context / original)
        if factor > 1.0 and original == 1:
            raise scaling.error(_ORIGINAL, "1 token says nothing about how attention grows")
        gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongScaling(
        short=_factors(scaling, "short_factor"),
        long=_factors(scaling, "long_factor"),
        original_context=original,
        gain=gain,
        context=context,
    )


def _factors(scaling: Fields, key: str) -> tuple[float, ...]:
    stated = scaling.values.get(key)
    if not isinstance(stated, list) or len(stated) > PAIRS_MAX:
        raise scaling.error(key, f"not a list of at most {PAIRS_MAX} numbers")
    single = {str(index): value for index, value in enumerate(stated)}
    each = Fields(single, f"{scaling.prefix}{key}.")
    return tuple(each.positive(index) for index in single)


def _original_context(fields: Fields, scaling: Fields) -> int:
    """Return the context before it was extended: some configs state it beside the scaling."""
    stated = [place for place in (scaling, fields) if place.has(_ORIGINAL)] or [scaling]
    lengths = [place.integer(_ORIGINAL, low=1, high=CONTEXT_LENGTH_LIMIT) for place in stated]
    if len(set(lengths)) > 1:
        raise scaling.error(_ORIGINAL, f"{lengths[0]} contradicts {lengths[1]} beside the scaling")
    return lengths[0]


def check_rope(fields: Fields, rope: RopeConfig, *, dims: int) -> None:
    """Refuse numbers of which no rotation of `dims` values of a head can be made.

    Raises:
        InvalidModel: factors of pairs are not one for each pair; or a wavelength, or what is
            multiplied by, is no number above 0 that float32 holds.
    """
    scaling, key = _scaling(fields)
    long = rope.scaling
    if isinstance(long, LongScaling):
        for name, factors in (("short_factor", long.short), ("long_factor", long.long)):
            if len(factors) != dims // 2:
                problem = f"{len(factors)} factors, {dims} values of a head rotate in pairs"
                raise scaling.error(name, problem)
    if not _is_rotation(rope, dims):
        problem = f"makes no rotation that float32 holds, by a base of {rope.base}"
        raise fields.error(key if scaling.values else "rope_theta", problem)


def _is_rotation(rope: RopeConfig, dims: int) -> bool:
    try:
        numbers = [rope.base, rope.position_scale, rope.gain, *(rope.periods(dims) or ())]
    except (ArithmeticError, ValueError):  # such as a logarithm of 0
        return False
    return all(FLOAT32_MIN <= number <= FLOAT32_MAX for number in numbers)


def refuse_longrope(fields: Fields) -> None:
    """Refuse a scaling by factors of single pairs, for an architecture that knows of none."""
    scaling, _ = _scaling(fields)
    key, kind = _kind(scaling)
    if kind == "longrope":
        raise scaling.error(key, f"{kind!r} is not supported by this architecture")


def _kind(scaling: Fields) -> tuple[str, object]:
    """Return the key that names the kind of scaling, and its value."""
    stated = [key for key in ("rope_type", "type") if scaling.has(key)]
    if len({str(scaling.values[key]) for key in stated}) > 1:
        # Readers differ in which of them they look at first.
        raise scaling.error("type", "contradicts rope_type")
    key = stated[0] if stated else "type"
    return key, scaling.values.get(key)
