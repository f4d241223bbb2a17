"""How images that keep their shape are made ready, as files say it: taken, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxd_models.files.image_settings import Growth, ImageSettings, read_image_settings
from mlxd_shared.domain.errors import InvalidModel
from tests.support.seeing import image_settings
from tests.support.seeing_shapes import PLACES_MAX, SIDE, shaped_settings
from tests.support.tiny_model import write_json

BOUND = 100


def read(folder: Path, *left_out: str, **changes: Any) -> ImageSettings:
    """Return what a file with these changes says."""
    stated = {key: value for key, value in shaped_settings().items() if key not in left_out}
    write_json(folder / "preprocessor_config.json", stated | changes)
    return read_image_settings(folder, side=SIDE, places_max=BOUND)


def test_limits_are_said_in_several_ways(tmp_path: Path) -> None:
    """By keys of their own, or as edges; by the processor itself where nothing says it."""
    whole = read(tmp_path)
    square = SIDE * SIDE
    assert (whole.pixels_min, whole.pixels_max) == (4 * square, PLACES_MAX * square)
    assert (whole.side, whole.shorter_side, whole.resample) == (SIDE, None, 3)
    edges = {"shortest_edge": 4 * square, "longest_edge": PLACES_MAX * square, "height": None}
    keys = ("min_pixels", "max_pixels")
    assert read(tmp_path, *keys, size=edges) == whole
    assert read(tmp_path, *keys, size=edges, max_pixels=5 * square).pixels_max == 5 * square
    assert read(tmp_path, image_processor_type="Qwen2VLImageProcessorFast") == whole
    plain = read(tmp_path, *keys)
    assert (plain.pixels_min, plain.pixels_max) == (56 * 56, BOUND * square)


def test_more_places_than_the_bound_are_not_made(tmp_path: Path) -> None:
    """Whatever a file allows."""
    square = SIDE * SIDE
    large = read(tmp_path, min_pixels=2 * BOUND * square, max_pixels=4 * BOUND * square)
    assert (large.pixels_min, large.pixels_max) == (BOUND * square, BOUND * square)


@pytest.mark.parametrize(
    ("name", "least", "most", "growth"),
    [
        ("Glm4vImageProcessor", 112 * 112 // 2, 28 * 28 * 15_000 // 2, Growth.WHOLE),
        ("Glm46VImageProcessorFast", 112 * 112 // 2, 28 * 28 * 15_000 // 2, Growth.WHOLE),
        ("PaddleOCRVLImageProcessor", 384 * 384, 1536 * 1536, Growth.BY_SIDE),
    ],
)
def test_other_processors_have_limits_of_their_own(
    name: str, least: int, most: int, growth: Growth, tmp_path: Path
) -> None:
    """GLM's count the pixels of both frames; each says what becomes of narrow images."""
    stated = {key: value for key, value in shaped_settings().items() if "pixels" not in key}
    write_json(tmp_path / "preprocessor_config.json", stated | {"image_processor_type": name})
    made = read_image_settings(tmp_path, side=SIDE, places_max=1 << 20)
    assert (made.pixels_min, made.pixels_max, made.growth) == (least, most, growth)


REFUSED: dict[str, dict[str, Any]] = {
    "image_processor_type": {"image_processor_type": "CLIPImageProcessor"},
    "do_resize": {"do_resize": False},
    "do_convert_rgb": {"do_convert_rgb": False},
    "do_pad": {"do_pad": True},
    "do_center_crop": {"do_center_crop": True},
    "patch_size": {"patch_size": SIDE},
    "merge_size": {"merge_size": 0},
    "size": {"size": {"height": SIDE, "width": SIDE}},
    "min_pixels": {"min_pixels": 10 * SIDE**2, "max_pixels": 9 * SIDE**2},
    "max_pixels": {"max_pixels": "many"},
    "temporal_patch_size": {
        "image_processor_type": "Glm4vImageProcessor",
        "min_pixels": 4 * SIDE**2,
        "max_pixels": 9 * SIDE**2,
        "temporal_patch_size": 5,
    },
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_refused_by_name(key: str, tmp_path: Path) -> None:
    """With the file and the key."""
    with pytest.raises(InvalidModel) as caught:
        read(tmp_path, **REFUSED[key])
    assert (caught.value.file, caught.value.field) == ("preprocessor_config.json", key)


def test_a_processor_belongs_to_its_kind_of_model(tmp_path: Path) -> None:
    """Squares are not made by the one that keeps shapes, nor shapes kept by one that makes them."""
    write_json(tmp_path / "preprocessor_config.json", shaped_settings())
    with pytest.raises(InvalidModel, match="Qwen2VLImageProcessor"):
        read_image_settings(tmp_path, side=SIDE)
    write_json(tmp_path / "preprocessor_config.json", image_settings(SIDE))
    with pytest.raises(InvalidModel, match="is not one of Qwen2VLImageProcessor"):
        read_image_settings(tmp_path, side=SIDE, places_max=BOUND)
