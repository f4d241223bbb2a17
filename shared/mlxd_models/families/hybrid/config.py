"""config.json of models with recurrent layers, and with full attention in every few of them.

Invariants:
- A text has one position a token, so the three axes of `mrope_section` are all that position, and
  the section changes nothing.
- What is not honoured is refused by name: a picture's half of the model, other forms of the
  recurrence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from mlxd_models.families.common.decoder import (
    HEADS_MAX,
    LAYERS_MAX,
    WIDTH_MAX,
    DecoderConfig,
    parse_decoder,
)
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.rope_fields import refuse_longrope
from mlxd_models.families.common.windows import FULL

LINEAR: Final = "linear_attention"
FULL_INTERVAL_DEFAULT: Final = 4
ROTARY_PART_DEFAULT: Final = 0.25
KERNEL_MAX: Final = 64
_ROPE_KEYS: Final = ("rope_parameters", "rope_scaling")
_ROTARY_PART: Final = "partial_rotary_factor"
_OWN_ROPE_KEYS: Final = frozenset({_ROTARY_PART, "mrope_section", "mrope_interleaved"})
_OWN_KEYS: Final = frozenset({_ROTARY_PART, "layer_types"})
_OTHER_MODELS: Final = ("text_config", "vision_config")


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The shape of the gated delta layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution sees, the current one among them."""
    grouped: bool = False
    """Whether what a row is projected to is stored key head by key head."""

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values, and of what gates the result."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of what goes through the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Width of all that is made of a token at once: that, the gate, the rates, the decays."""
        return self.mixed + self.values + 2 * self.value_heads

    @property
    def state_values(self) -> int:
        """Values that one layer remembers of a row."""
        return self.values * self.key_dim + (self.kernel - 1) * self.mixed


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The whole model: what it shares with a Llama, and its recurrent layers."""

    decoder: DecoderConfig
    delta: DeltaConfig
    full: tuple[bool, ...]
    """Which layers attend; the others are recurrent."""
    rotary_dim: int
    """The first values of a head, those that rotate."""

    def within(self, context: int) -> "HybridConfig":
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, decoder=self.decoder.within(context))


def parse_hybrid(fields: Fields) -> HybridConfig:
    """Return what the families of such models have in common; every layer's feed-forward dense."""
    _refuse_unsupported(fields)
    config = fields.values
    plain = {key: value for key, value in config.items() if key not in _OWN_KEYS}
    for key in _ROPE_KEYS:
        if isinstance(plain.get(key), Mapping):
            plain[key] = {k: v for k, v in plain[key].items() if k not in _OWN_ROPE_KEYS}
    refuse_longrope(Fields(plain))
    decoder = parse_decoder(Fields(plain))
    return HybridConfig(
        decoder=decoder,
        delta=_delta(fields),
        full=_full_layers(fields, layers=decoder.layers),
        rotary_dim=_rotary_dim(fields, decoder.head_dim),
    )


def _refuse_unsupported(fields: Fields) -> None:
    for key in _OTHER_MODELS:
        if fields.has(key):
            raise fields.error(key, "a model nested in another's config is not supported")
    fields.demand("attn_output_gate", only=True)
    fields.demand("use_sliding_window", only=False)
    fields.demand("mlp_bias", only=False)
    if fields.has("mamba_ssm_dtype"):
        fields.demand("mamba_ssm_dtype", "float32")


def _delta(fields: Fields) -> DeltaConfig:
    key_heads = fields.integer("linear_num_key_heads", low=1, high=HEADS_MAX)
    value_heads = fields.integer("linear_num_value_heads", low=1, high=HEADS_MAX)
    if value_heads % key_heads:
        problem = f"{key_heads} key heads do not divide {value_heads}"
        raise fields.error("linear_num_value_heads", problem)
    return DeltaConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", low=1, high=WIDTH_MAX),
        value_dim=fields.integer("linear_value_head_dim", low=1, high=WIDTH_MAX),
        kernel=fields.integer("linear_conv_kernel_dim", low=2, high=KERNEL_MAX),
    )


def _full_layers(fields: Fields, *, layers: int) -> tuple[bool, ...]:
    interval = fields.integer(
        "full_attention_interval", low=1, high=LAYERS_MAX, default=FULL_INTERVAL_DEFAULT
    )
    by_rule = tuple((index + 1) % interval == 0 for index in range(layers))
    named = fields.layers_of("layer_types", (FULL, LINEAR), layers)
    full = by_rule if named is None else named
    if fields.has("full_attention_interval") and full != by_rule:
        raise fields.error("layer_types", "contradicts full_attention_interval")
    if all(full):
        raise fields.error("layer_types", f"no layer is {LINEAR!r}")
    return full


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    parts: dict[str, float] = {}
    nested = [
        Fields(fields.values[key], f"{key}.")
        for key in _ROPE_KEYS
        if isinstance(fields.values.get(key), Mapping)
    ]
    for place in (*nested, fields):
        if place.has(_ROTARY_PART):
            parts[place.prefix + _ROTARY_PART] = place.positive(_ROTARY_PART)
    if len(set(parts.values())) > 1:
        raise fields.error(_ROTARY_PART, f"has several values: {parts}")
    if not any(place.has("rope_theta") for place in (*nested, fields)):
        # Its default differs from reader to reader.
        raise fields.error("rope_theta", "missing")
    name, part = next(iter(parts.items()), (_ROTARY_PART, ROTARY_PART_DEFAULT))
    rotary_dim = int(head_dim * part)
    if part > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(name, f"{part} of {head_dim} values is not an even number of them")
    return rotary_dim
