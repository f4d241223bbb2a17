"""gpt-oss: sinks, windows in every other layer, and experts with biases and clamped gates.

Invariants:
- Shares of the chosen experts alone, or of all made to sum to one, are the same numbers.
- Where mlx-lm ignores a key (`truncate`, `swiglu_limit`), it means what transformers makes of it.
- A checkpoint stores an expert's gates and ups row by row in turns (as published, packed), column
  by column in turns (as transformers writes numbers), or apart (as mlx-lm converts them).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common import decoder
from mlxd_models.families.common.experts import (
    EXPERT_LINEARS,
    ExpertsConfig,
    GateClamp,
    experts_of,
)
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.packing import BYTE_DTYPE, WORD_DTYPE, Packing, PackingMode
from mlxd_models.families.common.tensors import WHOLE, Operation, Source, TensorSpec, Turn
from mlxd_models.families.common.windows import named_sliding, windows_of

LIMIT_DEFAULT: Final = 7.0
SLOPE_DEFAULT: Final = 1.702
NORM_EPS_DEFAULT: Final = 1e-5
STACK: Final = "mlp.experts"
BLOCK_BYTES: Final = 16
"""Bytes of a group's values, which are an axis of their own in the published layout."""

PUBLISHED: Final = Packing(group_size=32, bits=4, mode=PackingMode.MXFP4)
_JOINED: Final = "gate_up_proj"
_TURNS: Final = {"gate_proj": (_JOINED, Turn(0, 2)), "up_proj": (_JOINED, Turn(1, 2))}
"""Where the outputs of a linear are among those of what is stored in its place."""


def parse_gpt_oss(config: Mapping[str, Any]) -> decoder.DecoderConfig:
    """Return the config of a `GptOssForCausalLM`."""
    stated = config.get("rms_norm_eps")
    fields = Fields({**config, "rms_norm_eps": NORM_EPS_DEFAULT if stated is None else stated})
    for key, high in (("head_dim", decoder.WIDTH_MAX), ("num_key_value_heads", decoder.HEADS_MAX)):
        # Their defaults do not follow from other sizes.
        fields.integer(key, low=1, high=high)
    if not (fields.has("rope_scaling") or fields.has("rope_parameters")):
        raise fields.error("rope_scaling", "missing, and readers differ in what that means")
    nested = config.get("rope_parameters")
    theta = nested.get("rope_theta") if isinstance(nested, Mapping) else None
    if theta is None and not fields.has("rope_theta"):
        raise fields.error("rope_theta", "missing, and readers differ in what that means")
    biased = fields.flag("attention_bias", default=True)
    fields.demand("mlp_bias", only=False)
    parsed = decoder.parse_decoder(fields)
    sliding = named_sliding(fields, layers=parsed.layers)
    if sliding is None:
        sliding = tuple(index % 2 == 0 for index in range(parsed.layers))
    return replace(
        parsed,
        qkv_bias=biased,
        output_bias=biased,
        sinks=True,
        windows=windows_of(fields, sliding, context_max=parsed.context_max),
        experts=_experts(fields, parsed),
    )


def _experts(fields: Fields, parsed: decoder.DecoderConfig) -> ExpertsConfig:
    count = experts_of(fields, "num_local_experts", layers=parsed.layers)
    chosen = fields.integer("num_experts_per_tok", low=1, high=count)
    if fields.integer("experts_per_token", low=1, high=count, default=chosen) != chosen:
        raise fields.error("experts_per_token", "contradicts num_experts_per_tok")
    return ExpertsConfig(
        count=count,
        chosen=chosen,
        mlp=parsed.mlp,
        normalised=True,
        layers=(True,) * parsed.layers,
        clamp=GateClamp(
            limit=fields.positive("swiglu_limit", default=LIMIT_DEFAULT),
            slope=fields.positive("swiglu_alpha", default=SLOPE_DEFAULT),
        ),
        biased=True,
        router="mlp.router",
        stack=STACK,
    )


def gpt_oss_tensors(config: decoder.DecoderConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    names = {
        f"{decoder.layer_prefix(index)}{STACK}.{linear}": linear
        for index in range(config.layers)
        for linear in EXPERT_LINEARS
    }
    specs = []
    for spec in decoder.llama_tensors(config):
        stem, _, part = spec.name.rpartition(".")
        if stem not in names:
            specs.append(spec)
        elif part == "bias":
            specs.append(replace(spec, instead=(_stored_bias(spec, stem, names[stem]),)))
        else:
            linear = names[stem]
            layouts = (_published_specs(spec, stem, linear), _in_numbers(spec, stem, linear))
            specs.append(replace(spec, instead=tuple(filter(None, layouts))))
    return tuple(specs)


def _stored_bias(spec: TensorSpec, stem: str, linear: str) -> tuple[TensorSpec, ...]:
    name, turn, outputs = _place(stem, linear, spec.shape[1])
    source = Source(f"{name}_bias", (spec.shape[0], outputs), Operation.OUTPUTS, turn=turn)
    return (replace(spec, source=source),)


def _published_specs(spec: TensorSpec, stem: str, linear: str) -> tuple[TensorSpec, ...]:
    """Return words and scales as they follow from the published blocks; none where none can."""
    count, outputs, inputs = spec.shape
    if not PUBLISHED.suits(inputs):
        return ()
    name, turn, rows = _place(stem, linear, outputs)
    groups = PUBLISHED.groups(inputs)
    blocks, exponents = (count, rows, groups, BLOCK_BYTES), (count, rows, groups)
    weight = replace(
        spec,
        shape=(count, outputs, PUBLISHED.words(inputs)),
        packing=PUBLISHED,
        packed=True,
        packable=False,
        dtype=WORD_DTYPE,
        source=Source(f"{name}_blocks", blocks, Operation.OUTPUT_WORDS, BYTE_DTYPE, turn),
    )
    scales = replace(
        spec,
        name=f"{stem}.scales",
        shape=(count, outputs, groups),
        packing=PUBLISHED,
        beside=True,
        packable=False,
        dtype=BYTE_DTYPE,
        source=Source(f"{name}_scales", exponents, Operation.OUTPUTS, BYTE_DTYPE, turn),
    )
    return (weight, scales)


def _in_numbers(spec: TensorSpec, stem: str, linear: str) -> tuple[TensorSpec, ...]:
    """Return the weight as it follows from one whose outputs are its last axis."""
    count, outputs, inputs = spec.shape
    name, turn, columns = _place(stem, linear, outputs)
    source = Source(name, (count, inputs, columns), Operation.LAST_OUTPUTS, turn=turn)
    return (replace(spec, packing=None, source=source),)


def _place(stem: str, linear: str, outputs: int) -> tuple[str, Turn, int]:
    """Return what is stored in a linear's place, which of its outputs, and of how many."""
    if linear not in _TURNS:
        return stem, WHOLE, outputs
    joined, turn = _TURNS[linear]
    return f"{stem.removesuffix(linear)}{joined}", turn, 2 * outputs


GPT_OSS: Final = llama_family(parse_gpt_oss, "gpt_oss", tensors=gpt_oss_tensors)
