"""What configs of models that see say alike: where the tower is, its colours, an image's token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxd_models.families.common.decoder import VOCAB_MAX, WIDTH_MAX
from mlxd_models.families.common.fields import Fields

VISION_CONFIG: Final = "vision_config"
PLACEHOLDER: Final = "image_token_id"
COLOURS: Final = 3
MERGE_MAX: Final = 16
"""Patches to a side of a place."""
FRAMES_MAX: Final = 16
"""Pictures of a patch, one behind another."""


def tower_fields(fields: Fields) -> Fields:
    """Return the tower's part of a config; raises InvalidModel if there is none."""
    if not fields.has(VISION_CONFIG):
        raise fields.error(VISION_CONFIG, "missing")
    return fields.part(VISION_CONFIG)


def fill_in(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return fields in which a key that is absent, or null, is what `defaults` say."""
    stated = {key: value for key, value in fields.values.items() if value is not None}
    return Fields({**defaults, **stated}, fields.prefix)


def check_colours(fields: Fields, *keys: str) -> None:
    """Raise InvalidModel for another number of colours, by any of its names."""
    for key in keys:
        if fields.integer(key, low=1, high=WIDTH_MAX, default=COLOURS) != COLOURS:
            raise fields.error(key, f"only {COLOURS} are supported")


def place_token(fields: Fields, *keys: str, vocab: int, default: int | None = None) -> int:
    """Return a token of images, by any of its names.

    Raises:
        InvalidModel: names contradict each other, or the token is beyond the vocabulary; or none
            is stated and there is no default.
    """
    stated = [fields.integer(key, low=0, high=VOCAB_MAX) for key in keys if fields.has(key)]
    if len(set(stated)) > 1:
        raise fields.error(keys[1], f"{stated[1]} contradicts {keys[0]}")
    first = keys[0]
    chosen = stated[0] if stated else fields.integer(first, low=0, high=VOCAB_MAX, default=default)
    if chosen >= vocab:
        raise fields.error(first, f"{chosen} is beyond the vocabulary of {vocab}")
    return chosen
