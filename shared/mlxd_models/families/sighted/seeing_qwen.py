"""A Qwen that sees, whatever its text and its tower are: its config, and what it takes.

Invariants:
- A text is read as it is where it stands alone, but that its heads turn by three axes.
- Images keep their shape. The most places that one takes are `IMAGE_PLACES_MAX`, whatever a model's
  files allow.
- A checkpoint without any tensor of the tower, or without what says how images are made ready, is
  its text alone (`Family.blind`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.sight_fields import (
    PLACEHOLDER,
    VISION_CONFIG,
    place_token,
    tower_fields,
)
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.hybrid.config import HybridConfig
from mlxd_models.families.sighted.qwen_parts import (
    Sections,
    nested_text,
    qwen_name,
    qwen_text_name,
    take_sections,
    turn_by,
)
from mlxd_models.families.sighted.stacked import StackedConfig, parse_stacked, stacked_tensors
from mlxd_models.families.sighted.windowed import WindowedConfig
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared import config as bounds

Text = TypeVar("Text", DecoderConfig, HybridConfig)
Tower = TypeVar("Tower", StackedConfig, WindowedConfig)


@dataclass(frozen=True, slots=True)
class SeeingQwen(Generic[Text, Tower]):
    """The shape of a Qwen that sees."""

    text: Text
    tower: Tower
    token_id: int

    def within(self, context: int) -> SeeingQwen[Text, Tower]:
        """Return the config of a model no row of which is ever longer than `context`."""
        return replace(self, text=self.text.within(context))


Stacked: TypeAlias = SeeingQwen[Text, StackedConfig]


@dataclass(frozen=True, slots=True)
class NestedText(Generic[Text]):
    """How a text is read that is a part of a Qwen that sees."""

    architecture: str
    alone: Family[Text]
    """What it is where it stands alone."""
    sections: Sections
    """How many pairs turn by each of three axes, where the config does not say."""
    mixed: bool = True
    """Whether the axes take turns, pair by pair."""

    def parse(self, fields: Fields) -> Text:
        """Return its config, out of the whole."""
        own = nested_text(self.architecture, fields)
        plain, sections = take_sections(own, self.sections, mixed=self.mixed)
        text = self.alone.parse(plain)
        turn = partial(turn_by, own, sections=sections, mixed=self.mixed)
        if isinstance(text, HybridConfig):
            rope = turn(text.decoder.rope, dims=text.rotary_dim)
            return replace(text, decoder=replace(text.decoder, rope=rope))
        return replace(text, rope=turn(text.rope, dims=text.head_dim))

    def parse_blind(self, config: Mapping[str, Any]) -> Text:
        """Return its config where there is no tower: its tokens have one place on all axes."""
        own = nested_text(self.architecture, Fields(config))
        return self.alone.parse(take_sections(own, self.sections, mixed=self.mixed)[0])


def put_together(
    fields: Fields, text: Text, tower: Tower, *, token_id: int
) -> SeeingQwen[Text, Tower]:
    """Return the config of a text and its tower.

    token_id: what stands for an image where the config does not say.

    Raises:
        InvalidModel: features are not as wide as the text's rows, or the token that stands for an
            image is beyond the vocabulary.
    """
    decoder = text.decoder if isinstance(text, HybridConfig) else text
    if tower.output != decoder.hidden:
        problem = f"{tower.output} is not the text's hidden_size of {decoder.hidden}"
        raise fields.error(f"{VISION_CONFIG}.out_hidden_size", problem)
    place = place_token(fields, PLACEHOLDER, vocab=decoder.vocab, default=token_id)
    return SeeingQwen(text, tower, place)


def parse_stacked_qwen(
    config: Mapping[str, Any],
    text: NestedText[Text],
    *,
    token_id: int,
    deep: tuple[int, ...] = (),
) -> Stacked[Text]:
    """Return the config of a model with a stacked tower; raises InvalidModel, naming the key.

    token_id, deep: what stands for an image, and the tower's deep layers, where not stated.
    """
    fields = Fields(config)
    seen = tower_fields(fields)
    own = text.parse(fields)
    return put_together(fields, own, parse_stacked(seen, deep=deep), token_id=token_id)


def stacked_family(
    builder: str,
    model_type: str,
    text: NestedText[Text],
    parse: Callable[[Mapping[str, Any]], Stacked[Text]],
) -> Family[Stacked[Text]]:
    """Return a family whose models are a text and a stacked tower."""

    def tensors(config: Stacked[Text]) -> tuple[TensorSpec, ...]:
        return (*text.alone.tensors(config.text), *stacked_tensors(config.tower))

    def footprint(config: Stacked[Text]) -> Footprint:
        tower = config.tower
        settled = tower.settled_values_of(bounds.IMAGE_PLACES_MAX)
        plain = text.alone.footprint(config.text)
        return with_sight(plain, config, levels=tower.levels, settled_values=settled)

    return Family(
        builder,
        parse,
        tensors,
        footprint,
        model_type,
        qwen_name,
        blind=blind_of(text.alone, text.parse_blind),
    )


def blind_of(alone: Family[Text], parse: Callable[[Mapping[str, Any]], Text]) -> Family[Text]:
    """Return what a model is that does not see: its text, whose config `parse` finds."""
    return replace(alone, parse=parse, model_type="", name_of=qwen_text_name)


def with_sight(
    plain: Footprint, config: SeeingQwen[Text, Tower], *, levels: int = 0, settled_values: int = 0
) -> Footprint:
    """Return a text's footprint with how the model sees; levels, settled_values: `SightSizes`."""
    sight = SightSizes(
        token_id=config.token_id,
        tokens=bounds.IMAGE_PLACES_MAX,
        side=config.tower.side,
        hidden=plain.passes.hidden,
        pass_values=config.tower.pass_values_of(bounds.IMAGE_PLACES_MAX),
        settled_values=settled_values,
        float_values=config.tower.float_values_of(bounds.IMAGE_PLACES_MAX),
        varies=True,
        levels=levels,
    )
    return replace(plain, sight=sight)
