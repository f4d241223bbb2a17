"""What a worker knows of how its model sees, free of MLX; and images at their places in a prompt.

Invariants:
- A placeholder is a token that the model's template wrote: what people write never becomes one
  (`control_tokens`). There is one for each image, in the images' order, or the request is refused.
- In a prompt each becomes as many tokens as a feature has rows. In the prompt's key, by which
  former prompts are looked up, these are numbers made of the image's name, which no token has.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from hashlib import shake_256
from typing import Any, Final

from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_models.files.model_config import TOKENIZER_FILE
from mlxd_models.files.model_source import Source
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_worker.cache.prefix.images import IMAGE_BEGINS, OF_IMAGE, VALUE_MASK
from mlxd_worker.engine.request import Image
from mlxd_worker.vision.asking import Bytes

FIELD: Final = "chat.messages"


@dataclass(frozen=True, slots=True)
class Sight:
    """How one model sees."""

    sizes: SightSizes
    settings: ImageSettings

    @property
    def target(self) -> dict[str, Any]:
        """What an image is to become, as the process that decodes it is told."""
        names = ("side", "shorter_side", "resample", "pixels_min", "pixels_max", "growth")
        stated = {name: value for name, value in asdict(self.settings).items() if name in names}
        return {**stated, "places_max": self.sizes.places_max}


def read_sight(source: Source, sizes: SightSizes | None) -> Sight | None:
    """Return how a model of these sizes sees; None where it reads text alone.

    Raises:
        InvalidModel: its files do not say how images are made ready; names the file and the key.
    """
    if sizes is None:
        return None
    settings = read_image_settings(
        source, side=sizes.side, places_max=sizes.places_max, tokens=sizes.tokens_each
    )
    return Sight(sizes, settings)


def check_placeholder(sight: Sight, control_ids: Collection[int]) -> None:
    """Refuse a model for whose images stands a token that anybody could write.

    Raises:
        InvalidModel: it is none of the tokens that only a template can write.
    """
    for token_id in (sight.sizes.token_id, *(sight.sizes.marks or ())):
        if token_id not in control_ids:
            problem = f"{token_id}, which stands for an image, is no control token"
            raise InvalidModel(problem, TOKENIZER_FILE, "added_tokens")


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt with images in it."""

    ids: tuple[int, ...]
    keys: tuple[int, ...]
    """By which it is looked up among former ones."""
    images: tuple[Image, ...]


def place_images(
    ids: Sequence[int],
    images: Sequence[tuple[bytes, Bytes]],
    sizes: SightSizes,
    grids: Sequence[tuple[int, int] | None] = (),
) -> Placed:
    """Return a rendered prompt with its images in the places of their tokens. Pure.

    images: the name and the pixels of each. grids: the rows and columns of each one's places, where
    they keep their shape.

    Raises:
        InvalidRequest: the template wrote more placeholders than there are images, or fewer, or
            nothing behind the last.
    """
    places = [at for at, token_id in enumerate(ids) if token_id == sizes.token_id]
    if len(places) != len(images):
        problem = f"the model's template writes {len(places)} places for {len(images)} images"
        raise InvalidRequest.of(FIELD, problem)
    if places and places[-1] == len(ids) - 1:
        raise InvalidRequest.of(FIELD, "the model's template writes nothing behind the last image")
    all_ids: list[int] = []
    keys: list[int] = []
    placed: list[Image] = []
    before = 0
    grids = grids or (None,) * len(images)
    for at, (name, pixels), grid in zip(places, images, grids, strict=True):
        tokens = sizes.tokens if grid is None else grid[0] * grid[1]
        between = ids[before:at]
        all_ids += between
        keys += between
        placed.append(Image(name, len(all_ids), tokens, pixels, grid, sizes.whole))
        all_ids += [sizes.token_id] * tokens
        keys += key_of_image(name, tokens)
        before = at + 1
    all_ids += ids[before:]
    keys += ids[before:]
    return Placed(tuple(all_ids), tuple(keys), tuple(placed))


def key_of_image(name: bytes, tokens: int) -> list[int]:
    """Return what stands for an image in a prompt's key: 30 bits of its name's hash a token."""
    values = array("I", shake_256(name).digest(4 * tokens))
    keys = [OF_IMAGE | value & VALUE_MASK for value in values]
    keys[0] |= IMAGE_BEGINS
    return keys
