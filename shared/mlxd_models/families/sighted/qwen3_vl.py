"""Qwen3-VL: a Qwen3, dense or with experts, that reads what a stacked tower makes of images.

Invariants:
- What a tower's deep layers give is added to the places of an image behind the text's first layers,
  one level a layer.
- Heads turn by three axes, which take turns pair by pair.
- A checkpoint without any tensor of the tower is its text alone (`Family.blind`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, llama_tensors
from mlxd_models.families.common.family import Family, Footprint, llama_family, llama_footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.qwen3 import parse_qwen3
from mlxd_models.families.qwen3_moe import parse_qwen3_moe
from mlxd_models.families.sighted.qwen_parts import (
    VISION_CONFIG,
    check_output,
    nested_text,
    place_token,
    qwen_name,
    shaped_sight,
    take_sections,
    turn_by,
)
from mlxd_models.families.sighted.stacked import StackedConfig, parse_stacked, stacked_tensors

DENSE: Final = "Qwen3VLForConditionalGeneration"
SPARSE: Final = "Qwen3VLMoeForConditionalGeneration"
_TOKEN_DEFAULT: Final = 151_655
_SECTIONS_DEFAULT: Final = (24, 20, 20)
_DEEP_DEFAULT: Final = (8, 16, 24)
_Parse = Callable[[Mapping[str, Any]], DecoderConfig]


@dataclass(frozen=True, slots=True)
class Qwen3VlConfig:
    """The shape of a Qwen3-VL."""

    text: DecoderConfig
    tower: StackedConfig
    token_id: int

    def within(self, context: int) -> Qwen3VlConfig:
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, text=self.text.within(context))


def parse_qwen3_vl(config: Mapping[str, Any]) -> Qwen3VlConfig:
    """Return the config of a `Qwen3VLForConditionalGeneration`."""
    return _parse(config, DENSE, parse_qwen3)


def parse_qwen3_vl_moe(config: Mapping[str, Any]) -> Qwen3VlConfig:
    """Return the config of a `Qwen3VLMoeForConditionalGeneration`."""
    return _parse(config, SPARSE, _parse_experts)


def _parse_experts(config: Mapping[str, Any]) -> DecoderConfig:
    Fields(config).demand("norm_topk_prob", only=True)
    text = parse_qwen3_moe({**config, "norm_topk_prob": True})
    if text.experts is None:
        return text
    return replace(text, experts=replace(text.experts, fused=True, fused_by_input=True))


def _parse(config: Mapping[str, Any], architecture: str, parse: _Parse) -> Qwen3VlConfig:
    fields = Fields(config)
    if not fields.has(VISION_CONFIG):
        raise fields.error(VISION_CONFIG, "missing")
    own = nested_text(architecture, fields)
    plain, sections = take_sections(own, _SECTIONS_DEFAULT, mixed=True)
    text = parse(plain)
    rope = turn_by(own, text.rope, sections, dims=text.head_dim, mixed=True)
    tower = parse_stacked(fields.part(VISION_CONFIG), deep=_DEEP_DEFAULT)
    check_output(fields, tower.output, text.hidden)
    if tower.levels > text.layers:
        problem = f"{tower.levels} levels for {text.layers} layers of the text"
        raise fields.error(f"{VISION_CONFIG}.deepstack_visual_indexes", problem)
    token_id = place_token(fields, default=_TOKEN_DEFAULT, vocab=text.vocab)
    return Qwen3VlConfig(replace(text, rope=rope), tower, token_id)


def qwen3_vl_tensors(config: Qwen3VlConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    return (*llama_tensors(config.text), *stacked_tensors(config.tower))


def qwen3_vl_footprint(config: Qwen3VlConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    tower = config.tower
    sight = shaped_sight(
        token_id=config.token_id,
        side=tower.side,
        hidden=config.text.hidden,
        pass_values=tower.pass_values,
        levels=tower.levels,
    )
    return replace(llama_footprint(config.text), sight=sight)


def _parse_blind(config: Mapping[str, Any], *, architecture: str, parse: _Parse) -> DecoderConfig:
    """Return the text's config alone: its tokens have one place on all axes."""
    own = nested_text(architecture, Fields(config))
    return parse(take_sections(own, _SECTIONS_DEFAULT, mixed=True)[0])


def _blind(architecture: str, parse: _Parse) -> Family[DecoderConfig]:
    reads = partial(_parse_blind, architecture=architecture, parse=parse)
    return llama_family(reads, name_of=qwen_name)


QWEN3_VL: Final = Family(
    "mlxd_worker.models.families.qwen3_vl",
    parse_qwen3_vl,
    qwen3_vl_tensors,
    qwen3_vl_footprint,
    "qwen3_vl",
    qwen_name,
    blind=_blind(DENSE, parse_qwen3),
)
QWEN3_VL_MOE: Final = replace(
    QWEN3_VL,
    parse=parse_qwen3_vl_moe,
    model_type="qwen3_vl_moe",
    blind=_blind(SPARSE, _parse_experts),
)
