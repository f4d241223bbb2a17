"""Qwen2.5-VLs whose logits a reference has written down: what they are, and what they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxd_worker.engine.request import Image
from tests.support.random_model import write_random_model
from tests.support.seeing_shapes import shaped_config, write_shaped_settings

GOLDEN: Final = Path(__file__).parents[1] / "data" / "models" / "qwen_vl_logits.json"
"""Written by `python -m tests.support.qwen_vl_reference`."""
PLACE: Final = 5
PIECES: Final = ((7, 41, 8), (90, 17), (33, 12), (61, 200, 150, 61))
"""The text around three images."""
GRIDS: Final = ((3, 5), (1, 4), (4, 2))
"""Rows and columns of each image's places: within a window, at its edges, and beyond both."""
_TEXT_KEYS: Final = ("architectures", "vision_config", "image_token_id", "model_type")


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    name: str
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False
    """Whether the text is under a key of its own, as newer files have it."""

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        flat = shaped_config(token_id=PLACE, vision=self.vision, **self.text)
        if not self.nested:
            return flat
        text = {key: value for key, value in flat.items() if key not in _TEXT_KEYS}
        rope = text.pop("rope_scaling")
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta"),
            "mrope_section": rope["mrope_section"],
        }
        kept = {key: flat[key] for key in _TEXT_KEYS}
        return {**kept, "text_config": {**text, "model_type": "qwen2_5_vl_text"}}

    @property
    def merge(self) -> int:
        """Patches to a side of a place."""
        return int(self.config["vision_config"]["spatial_merge_size"])

    @property
    def side(self) -> int:
        """Side of a place, in pixels."""
        return self.merge * int(self.config["vision_config"]["patch_size"])

    @property
    def frames(self) -> int:
        """Pictures of a patch."""
        return int(self.config["vision_config"]["temporal_patch_size"])

    @property
    def prompt(self) -> tuple[int, ...]:
        """Text, an image, text, and so on."""
        shown = [(PLACE,) * rows * columns for rows, columns in GRIDS]
        return tuple(
            token
            for piece, image in zip(PIECES, [*shown, ()], strict=True)
            for token in (*piece, *image)
        )

    @property
    def images(self) -> tuple[Image, ...]:
        """The images at their places."""
        placed: list[Image] = []
        start = 0
        for piece, grid, pixels in zip(PIECES, GRIDS, self.pixels(), strict=False):
            start += len(piece)
            tokens = grid[0] * grid[1]
            placed.append(Image(b"%d" % start, start, tokens, pixels.tobytes(), grid))
            start += tokens
        return tuple(placed)

    def pixels(self) -> list[np.ndarray[Any, Any]]:
        """Return the images, uint8 [height, width, 3]."""
        draws = np.random.Generator(np.random.PCG64(9))
        return [
            draws.integers(0, 256, (rows * self.side, columns * self.side, 3), dtype=np.uint8)
            for rows, columns in GRIDS
        ]

    def write(self, folder: Path) -> Path:
        """Write the model; return its folder."""
        write_random_model(folder, self.config)
        return write_shaped_settings(folder, self.side, merge=self.merge)


_YARN: Final = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mrope_section": [2, 1, 1],
}

CASES: Final = (
    Case("windows-and-full"),
    Case("windows", vision={"fullatt_block_indexes": []}),
    Case("full", vision={"fullatt_block_indexes": [0, 1, 2]}),
    Case("wide-windows", vision={"window_size": 24}),
    Case("merge-one", vision={"spatial_merge_size": 1, "window_size": 8}),
    Case("one-frame", vision={"temporal_patch_size": 1}),
    Case("sections", text={"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}),
    Case("yarn", text={"rope_scaling": _YARN}),
    Case("nested", nested=True),
    Case("tied", text={"tie_word_embeddings": True}),
)
