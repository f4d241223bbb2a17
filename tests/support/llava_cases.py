"""LLaVAs whose logits a reference has written down: what they are, and what they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxd_worker.engine.request import Image
from tests.support.random_model import write_random_model
from tests.support.seeing import PATCH, SIDE, seeing_config, write_image_settings

GOLDEN: Final = Path(__file__).parents[1] / "data" / "models" / "llava_logits.json"
"""Written by `python -m tests.support.llava_reference`."""
PLACE: Final = 5
PIECES: Final = ((7, 41, 8), (90,), (33, 12, 200, 150, 61))
"""The text around two images."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    name: str
    tower: str = "clip"
    text: str = "llama"
    more: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config = seeing_config(tower=self.tower, text=self.text, token_id=PLACE, **self.more)
        return {**config, "vision_config": {**config["vision_config"], **self.vision}}

    @property
    def side(self) -> int:
        """Of an image, in pixels."""
        return int(self.config["vision_config"]["image_size"])

    @property
    def tokens(self) -> int:
        """Places of an image."""
        config = self.config
        patches = (self.side // int(config["vision_config"]["patch_size"])) ** 2
        is_full = config["vision_feature_select_strategy"] == "full"
        return patches + (is_full and self.tower == "clip")

    @property
    def prompt(self) -> tuple[int, ...]:
        """Text, an image, text, an image, text."""
        first, second, third = PIECES
        image = (PLACE,) * self.tokens
        return (*first, *image, *second, *image, *third)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images at their places."""
        first = len(PIECES[0])
        starts = first, first + self.tokens + len(PIECES[1])
        return tuple(
            Image(b"%d" % start, start, self.tokens, pixels.tobytes())
            for start, pixels in zip(starts, self.pixels(), strict=True)
        )

    def pixels(self) -> np.ndarray[Any, Any]:
        """Return the images, uint8 [2, side, side, 3]."""
        draws = np.random.Generator(np.random.PCG64(9))
        return draws.integers(0, 256, (2, self.side, self.side, 3), dtype=np.uint8)

    def write(self, folder: Path) -> Path:
        """Write the model; return its folder."""
        write_random_model(folder, self.config)
        return write_image_settings(folder, self.side, tower=self.tower)


CASES: Final = (
    Case("clip-llama"),
    Case("siglip-llama", tower="siglip"),
    Case("clip-mistral", text="mistral"),
    Case("siglip-qwen2", tower="siglip", text="qwen2"),
    Case("clip-full", more={"vision_feature_select_strategy": "full"}),
    Case("clip-first-layer", more={"vision_feature_layer": 1}),
    Case("clip-uneven", vision={"image_size": SIDE + PATCH // 2}),
    Case("clip-gelu", vision={"hidden_act": "gelu"}, more={"projector_hidden_act": "gelu"}),
    Case("projector-plain", more={"multimodal_projector_bias": False}),
)
