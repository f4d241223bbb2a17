"""Ten real pictures, the processors they are put through, and what transformers makes of them.

A processor is one row of `PROCESSORS`: a model's config and preprocessor_config.json as published,
as far as they decide what is seen, and transformers' own class, which makes the reference.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from transformers.image_utils import load_image

from mlxd_models.families.registry import REGISTRY
from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_models.sizes.sight_sizes import SightSizes
from tests.real_inputs import real_input
from tests.support.gemma3_cases import panning_settings, seeing_gemma3_config
from tests.support.qwen3_vl_cases import stacked_config
from tests.support.seeing import image_settings, seeing_config
from tests.support.seeing_shapes import shaped_config, shaped_settings
from tests.support.tiny_model import write_json

Floats = np.ndarray[Any, np.dtype[np.float32]]
FOLDER: Final = real_input("pictures")
PICTURES: Final = tuple(sorted(path.name for path in FOLDER.iterdir()))


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers makes of a picture."""

    pixels: Floats
    """[height, width, 3], as a tower takes them."""
    tokens: int
    """The places that it takes in a prompt."""


def stand_upright(pixels: Any) -> Floats:
    """Return one image's pixels [1, 3, height, width] as [height, width, 3]."""
    return np.asarray(pixels[0], np.float32).transpose(1, 2, 0)


@dataclass(frozen=True, slots=True)
class Processor:
    """How models of one kind see; `refer` is given transformers' processor and a picture."""

    name: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    module: str
    refer: Callable[[Any, Image.Image], Reference]

    def sizes(self) -> SightSizes:
        """Return what the model's description says of its sight."""
        family = REGISTRY[self.config["architectures"][0]]
        sizes = family.footprint(family.parse(self.config)).sight
        assert sizes is not None
        return sizes

    def read(self, folder: Path) -> ImageSettings:
        """Return the settings as they are read from a file, which is written into `folder`."""
        write_json(folder / "preprocessor_config.json", dict(self.settings))
        sizes = self.sizes()
        return read_image_settings(folder, side=sizes.side, places_max=sizes.places_max)

    def reference(self, picture: str) -> Reference:
        """Return what transformers makes of a file, opened and turned as transformers does."""
        settings = dict(self.settings)
        name = f"{settings.pop('image_processor_type')}Pil"
        module = f"transformers.models.{self.module}.image_processing_pil_{self.module}"
        kind = getattr(importlib.import_module(module), name)
        return self.refer(kind(**settings), load_image(str(FOLDER / picture)))


def _make_llava(*, tower: str, side: int, patch: int) -> Processor:
    """LLaVA's; as many places as its processor writes for the strategy of its tower."""
    config = seeing_config(tower=tower)
    config["vision_config"] |= {"image_size": side, "patch_size": patch}

    def refer(processor: Any, image: Image.Image) -> Reference:
        from transformers.models.llava.processing_llava import LlavaProcessor  # noqa: PLC0415

        made = processor(image, return_tensors="np")["pixel_values"]
        whole = LlavaProcessor.__new__(LlavaProcessor)  # its tokenizer is not asked
        whole.image_token, whole.patch_size = "@", patch
        whole.vision_feature_select_strategy = config["vision_feature_select_strategy"]
        whole.num_additional_image_tokens = int(tower == "clip")
        tokens = len(whole.replace_image_token({"pixel_values": made}, 0))
        return Reference(stand_upright(made), tokens)

    module = {"clip": "clip", "siglip": "siglip"}[tower]
    return Processor(f"llava-{tower}-{side}", config, image_settings(side, tower=tower), module,
                     refer)  # fmt: skip


def _make_qwen_vl(name: str, *, pixels_min: int, pixels_max: int) -> Processor:
    """Qwen2.5-VL's: 14 pixels a patch, two patches to a side of a place."""
    vision = {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
    settings = shaped_settings(28, merge=2, min_pixels=pixels_min, max_pixels=pixels_max)
    return Processor(name, shaped_config(vision=vision), settings, "qwen2_vl", refer_patches)


def _make_qwen3_vl() -> Processor:
    """Qwen3-VL's, and Qwen3.5's: 16 pixels a patch, limits as edges."""
    config = stacked_config(vision={"patch_size": 16, "spatial_merge_size": 2})
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    return Processor("qwen3-vl", config, settings, "qwen2_vl", refer_patches)


def _make_gemma3() -> Processor:
    """Gemma 3's: squares of 896 pixels, bilinear, 256 places."""
    vision = {"image_size": 896, "patch_size": 14}
    config = seeing_gemma3_config(vision=vision, mm_tokens_per_image=256)

    def refer(processor: Any, image: Image.Image) -> Reference:
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor  # noqa: PLC0415

        made = processor(image, return_tensors="np")["pixel_values"]
        places = inspect.signature(Gemma3Processor.__init__).parameters["image_seq_length"]
        return Reference(stand_upright(made), int(places.default))

    return Processor("gemma3", config, panning_settings(896), "gemma3", refer)


def refer_patches(processor: Any, image: Image.Image) -> Reference:
    """Return what a processor of patches makes: place by place, each of `merge` squared patches."""
    made = processor(image, return_tensors="np")
    ((frames, height, width),) = np.asarray(made["image_grid_thw"]).tolist()
    merge, patch, deep = (
        processor.merge_size, processor.patch_size, processor.temporal_patch_size,
    )  # fmt: skip
    assert frames == 1
    rows, columns = height // merge, width // merge
    shape = (rows, columns, merge, merge, 3, deep, patch, patch)
    patches = np.asarray(made["pixel_values"], np.float32).reshape(shape)
    assert (patches == patches[:, :, :, :, :, :1]).all(), "each frame is the same picture"
    turned = patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    return Reference(turned.reshape(height * patch, width * patch, 3), rows * columns)


PROCESSORS: Final = (
    _make_llava(tower="clip", side=336, patch=14),
    _make_llava(tower="siglip", side=384, patch=14),
    _make_qwen_vl("qwen2.5-vl", pixels_min=56 * 56, pixels_max=28 * 28 * 16_384),
    _make_qwen_vl("qwen2.5-vl-small", pixels_min=256 * 28 * 28, pixels_max=280 * 28 * 28),
    _make_qwen3_vl(),
    _make_gemma3(),
)
"""The small one's limits, as applications set them, make nearly every picture larger or smaller."""
