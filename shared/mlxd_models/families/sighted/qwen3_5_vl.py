"""Qwen3.5 with its tower: a hybrid text, dense or with experts, that reads what it makes of images.

Invariants:
- The tower gives its last layer alone.
- The part of a head that turns does so by three axes, which take turns pair by pair; recurrent
  layers know nothing of them.
- A checkpoint without any tensor of the tower is its text alone (`Family.blind`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.hybrid.qwen3_5 import parse_qwen3_5
from mlxd_models.families.hybrid.qwen3_5_moe import parse_qwen3_5_moe
from mlxd_models.families.hybrid.tensors import (
    hybrid_family,
    qwen3_5_footprint,
    qwen3_5_tensors,
)
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

DENSE: Final = "Qwen3_5ForConditionalGeneration"
SPARSE: Final = "Qwen3_5MoeForConditionalGeneration"
_TOKEN_DEFAULT: Final = 248_056
_SECTIONS_DEFAULT: Final = (11, 11, 10)
_Parse = Callable[[Mapping[str, Any]], HybridConfig]


@dataclass(frozen=True, slots=True)
class Qwen35VlConfig:
    """The shape of a Qwen3.5 that sees."""

    text: HybridConfig
    tower: StackedConfig
    token_id: int

    def within(self, context: int) -> Qwen35VlConfig:
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, text=self.text.within(context))


def parse_qwen3_5_vl(config: Mapping[str, Any]) -> Qwen35VlConfig:
    """Return the config of a `Qwen3_5ForConditionalGeneration`."""
    return _parse(config, DENSE, parse_qwen3_5)


def parse_qwen3_5_moe_vl(config: Mapping[str, Any]) -> Qwen35VlConfig:
    """Return the config of a `Qwen3_5MoeForConditionalGeneration`."""
    return _parse(config, SPARSE, parse_qwen3_5_moe)


def _parse(config: Mapping[str, Any], architecture: str, parse: _Parse) -> Qwen35VlConfig:
    fields = Fields(config)
    if not fields.has(VISION_CONFIG):
        raise fields.error(VISION_CONFIG, "missing")
    own = nested_text(architecture, fields)
    plain, sections = take_sections(own, _SECTIONS_DEFAULT, mixed=True)
    text = parse(plain)
    rope = turn_by(own, text.decoder.rope, sections, dims=text.rotary_dim, mixed=True)
    tower = parse_stacked(fields.part(VISION_CONFIG))
    check_output(fields, tower.output, text.decoder.hidden)
    if tower.levels:
        problem = f"{list(tower.deep)} are not supported, only none"
        raise fields.error(f"{VISION_CONFIG}.deepstack_visual_indexes", problem)
    token_id = place_token(fields, default=_TOKEN_DEFAULT, vocab=text.decoder.vocab)
    return Qwen35VlConfig(replace(text, decoder=replace(text.decoder, rope=rope)), tower, token_id)


def qwen3_5_vl_tensors(config: Qwen35VlConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    return (*qwen3_5_tensors(config.text), *stacked_tensors(config.tower))


def qwen3_5_vl_footprint(config: Qwen35VlConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    sight = shaped_sight(
        token_id=config.token_id,
        side=config.tower.side,
        hidden=config.text.decoder.hidden,
        pass_values=config.tower.pass_values,
    )
    return replace(qwen3_5_footprint(config.text), sight=sight)


def _parse_blind(config: Mapping[str, Any], *, architecture: str, parse: _Parse) -> HybridConfig:
    """Return the text's config alone: its tokens have one place on all axes."""
    own = nested_text(architecture, Fields(config))
    return parse(take_sections(own, _SECTIONS_DEFAULT, mixed=True)[0])


def _blind(architecture: str, parse: _Parse) -> Family[HybridConfig]:
    reads = partial(_parse_blind, architecture=architecture, parse=parse)
    return replace(hybrid_family(reads, ""), name_of=qwen_name)


QWEN3_5_VL: Final = Family(
    "mlxd_worker.models.families.qwen3_5_vl",
    parse_qwen3_5_vl,
    qwen3_5_vl_tensors,
    qwen3_5_vl_footprint,
    "qwen3_5",
    qwen_name,
    blind=_blind(DENSE, parse_qwen3_5),
)
QWEN3_5_MOE_VL: Final = replace(
    QWEN3_5_VL,
    parse=parse_qwen3_5_moe_vl,
    model_type="qwen3_5_moe",
    blind=_blind(SPARSE, parse_qwen3_5_moe),
)
