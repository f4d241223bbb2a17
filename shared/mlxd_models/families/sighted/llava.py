"""LLaVA: a CLIP or SigLIP tower, two linears, and a Llama, Mistral or Qwen2 that reads them.

Invariants:
- An image takes as many places as the tower has patches; with the strategy `full` of a CLIP tower
  one more, for the row that stands before them.
- A checkpoint without any tensor of the tower, or without what says how images are made ready, is
  its text alone (`Family.blind`).
- Features are rows of one layer as it leaves them: no norm comes between them and the projector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from mlxd_models.families.common.decoder import DecoderConfig, llama_tensors
from mlxd_models.families.common.family import Family, Footprint, llama_family, llama_footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import VISION_CONFIG, place_token, tower_fields
from mlxd_models.families.common.tensors import TensorSpec, linear_specs
from mlxd_models.families.llama import parse_llama
from mlxd_models.families.mistral import parse_mistral
from mlxd_models.families.qwen2 import parse_qwen2
from mlxd_models.families.sighted.tower import (
    TowerActivation,
    TowerConfig,
    parse_tower,
    tower_name,
    tower_tensors,
)
from mlxd_models.files.nested_text import TEXT_CONFIG, text_config, text_name
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_models.sizes.weight_forms import TOWER_PREFIX
from mlxd_shared.config import IMAGE_TOKENS_MAX

ARCHITECTURE: Final = "LlavaForConditionalGeneration"
PROJECTOR: Final = "multi_modal_projector."
FIRST, SECOND = f"{PROJECTOR}linear_1", f"{PROJECTOR}linear_2"
_TOKEN_KEYS: Final = ("image_token_id", "image_token_index")
_TOKEN_DEFAULT: Final = 32_000
_Parse = Callable[[Mapping[str, Any]], DecoderConfig]

_TEXTS: Final[Mapping[str, tuple[_Parse, Mapping[str, Any]]]] = MappingProxyType(
    {
        "llama": (
            parse_llama,
            {
                "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
                "num_hidden_layers": 32, "num_attention_heads": 32,
                "max_position_embeddings": 2048,
            },
        ),
        "mistral": (
            parse_mistral,
            {
                "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "max_position_embeddings": 131_072, "sliding_window": 4096,
            },
        ),
        "qwen2": (
            parse_qwen2,
            {
                "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                "max_position_embeddings": 32_768,
            },
        ),
    }
)  # fmt: skip
"""By the text's `model_type`: what reads its config, and what published ones leave out."""


@dataclass(frozen=True, slots=True)
class LlavaConfig:
    """The shape of a LLaVA."""

    text: DecoderConfig
    tower: TowerConfig
    activation: TowerActivation
    """Between the projector's two linears."""
    projector_bias: bool
    drops_class: bool
    """Whether the tower's first row is no feature (the strategy `default`)."""
    token_id: int

    @property
    def tokens(self) -> int:
        """How many places an image takes."""
        return self.tower.rows - self.drops_class

    def within(self, context: int) -> LlavaConfig:
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, text=self.text.within(context))


def parse_llava(config: Mapping[str, Any]) -> LlavaConfig:
    """Return the config of a `LlavaForConditionalGeneration`."""
    fields = Fields(config)
    text = _parse_text(config)
    seen = tower_fields(fields)
    layer = fields.values.get("vision_feature_layer", -2)
    if type(layer) is not int:
        raise fields.error("vision_feature_layer", f"{layer!r} is not supported, only one layer")
    strategy = fields.values.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.error(
            "vision_feature_select_strategy", f"{strategy!r} is neither 'default' nor 'full'"
        )
    activation = fields.values.get("projector_hidden_act", TowerActivation.GELU.value)
    if activation not in tuple(TowerActivation):
        raise fields.error("projector_hidden_act", f"{activation!r} is not supported")
    parsed = LlavaConfig(
        text=text,
        tower=parse_tower(seen, feature_layer=layer),
        activation=TowerActivation(activation),
        projector_bias=fields.flag("multimodal_projector_bias", default=True),
        drops_class=strategy == "default",
        token_id=place_token(fields, *_TOKEN_KEYS, vocab=text.vocab, default=_TOKEN_DEFAULT),
    )
    if not 1 <= parsed.tokens <= IMAGE_TOKENS_MAX:
        problem = f"an image takes {parsed.tokens} tokens, and at most {IMAGE_TOKENS_MAX}"
        raise fields.error(f"{VISION_CONFIG}.image_size", problem)
    return parsed


def _parse_text(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of the text, which is of one of several kinds."""
    fields, nested = Fields(config), text_config(ARCHITECTURE, config)
    if nested is None:
        raise fields.error(TEXT_CONFIG, "missing, or not an object")
    kind = nested.get("model_type", "llama")
    if kind not in _TEXTS:
        problem = f"{kind!r} is not a text that is known here: {', '.join(sorted(_TEXTS))}"
        raise fields.error(f"{TEXT_CONFIG}.model_type", problem)
    parse, defaults = _TEXTS[kind]
    return parse({**defaults, **nested})


def llava_tensors(config: LlavaConfig) -> tuple[TensorSpec, ...]:
    """Return every tensor that a checkpoint of this config holds or may hold."""
    seen, hidden, biased = config.tower.hidden, config.text.hidden, config.projector_bias
    shapes = {"linear_1": (hidden, seen, biased), "linear_2": (hidden, hidden, biased)}
    projector = [replace(spec, packable=False) for spec in linear_specs(None, PROJECTOR, shapes)]
    return (*llama_tensors(config.text), *tower_tensors(config.tower), *projector)


def llava_footprint(config: LlavaConfig) -> Footprint:
    """Return the sizes that the fit needs besides the weights."""
    features = 2 * config.tokens * config.text.hidden
    sight = SightSizes(
        token_id=config.token_id,
        tokens=config.tokens,
        side=config.tower.side,
        hidden=config.text.hidden,
        pass_values=config.tower.pass_values + features,
        settled_values=config.tower.settled_values + features,
        float_values=config.tower.float_values,
    )
    return replace(llama_footprint(config.text), sight=sight)


def llava_name(name: str) -> str | None:
    """Return how `llava_tensors` calls a stored tensor; None for one that is left unread."""
    own = name.removeprefix("model.")
    if own.startswith(TOWER_PREFIX):
        return tower_name(own.removeprefix(TOWER_PREFIX))
    return own if own.startswith(PROJECTOR) else text_name(name)


LLAVA: Final = Family(
    "mlxd_worker.models.families.llava",
    parse_llava,
    llava_tensors,
    llava_footprint,
    "llava",
    llava_name,
    blind=llama_family(_parse_text, name_of=text_name),
)
