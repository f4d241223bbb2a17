"""How images are made ready, as files say it: every key taken, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_shared.domain.errors import InvalidModel
from tests.support.gemma3_cases import panning_settings
from tests.support.seeing import image_settings
from tests.support.tiny_model import write_json

SIDE = 24


def read(folder: Path, **changes: Any) -> ImageSettings:
    """Return what a file with these changes says."""
    write_json(folder / "preprocessor_config.json", image_settings(SIDE) | changes)
    return read_image_settings(folder, side=SIDE)


def test_sizes_are_said_in_several_ways(tmp_path: Path) -> None:
    """One number or named sides, in the older file or within the newer; they mean the same."""
    whole = read(tmp_path)
    assert (whole.side, whole.shorter_side, whole.resample) == (SIDE, SIDE, 3)
    assert whole.scale == 1 / 255
    assert read(tmp_path, size=SIDE, crop_size=SIDE, image_processor_type=None) == whole
    assert read(tmp_path, image_processor_type="CLIPImageProcessorFast") == whole
    (tmp_path / "preprocessor_config.json").unlink()
    write_json(tmp_path / "processor_config.json", {"image_processor": image_settings(SIDE)})
    assert read_image_settings(tmp_path, side=SIDE) == whole
    squares = image_settings(SIDE, tower="siglip")
    write_json(tmp_path / "processor_config.json", {"image_processor": squares})
    square = read_image_settings(tmp_path, side=SIDE)
    assert (square.shorter_side, square.mean) == (None, (0.5, 0.5, 0.5))


def test_what_is_switched_off_changes_nothing(tmp_path: Path) -> None:
    """Without scaling or normalising pixels stay what they are there."""
    plain = read(tmp_path, do_rescale=False, do_normalize=False)
    assert (plain.scale, plain.mean, plain.deviation) == (1.0, (0.0,) * 3, (1.0,) * 3)


REFUSED: dict[str, dict[str, Any]] = {
    "image_processor_type": {"image_processor_type": "PixtralImageProcessor"},
    "do_resize": {"do_resize": False},
    "do_convert_rgb": {"do_convert_rgb": False},
    "do_pad": {"do_pad": True},
    "do_rescale": {"do_rescale": "yes"},
    "size": {"size": {"shortest_edge": SIDE - 1}},
    "crop_size": {"crop_size": {"height": SIDE, "width": SIDE + 1}},
    "resample": {"resample": 9},
    "rescale_factor": {"rescale_factor": 0},
    "image_mean": {"image_mean": [0.5, 0.5]},
    "image_std": {"image_std": [0.5, 0.5, 0]},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_refused_by_name(key: str, tmp_path: Path) -> None:
    """With the file and the key."""
    with pytest.raises(InvalidModel) as caught:
        read(tmp_path, **REFUSED[key])
    assert (caught.value.file, caught.value.field) == ("preprocessor_config.json", key)


def test_a_model_that_sees_says_how(tmp_path: Path) -> None:
    """Without either file it is refused."""
    with pytest.raises(InvalidModel) as caught:
        read_image_settings(tmp_path, side=SIDE)
    assert caught.value.file == "preprocessor_config.json"


def test_gemmas_processor_is_understood(tmp_path: Path) -> None:
    """As published, with what it leaves out; the number of places may be said, and is the model's;
    crops beside the image are refused by name."""

    def read_panning(**changes: Any) -> ImageSettings:
        stated = {key: value for key, value in changes.items() if value != "absent"}
        values = {key: value for key, value in panning_settings(SIDE).items() if key not in changes}
        write_json(tmp_path / "preprocessor_config.json", values | stated)
        return read_image_settings(tmp_path, side=SIDE, tokens=16)

    whole = read_panning()
    assert (whole.side, whole.shorter_side, whole.resample) == (SIDE, None, 2)
    assert (whole.mean, whole.deviation) == ((0.5,) * 3, (0.5,) * 3)
    assert read_panning(resample="absent", image_mean="absent", image_std="absent") == whole
    assert read_panning(image_seq_length=16, do_pan_and_scan=False) == whole
    for key, value in (("do_pan_and_scan", True), ("image_seq_length", 256)):
        with pytest.raises(InvalidModel) as caught:
            read_panning(**{key: value})
        assert caught.value.field == key
    write_json(tmp_path / "processor_config.json", {"image_seq_length": 144})
    with pytest.raises(InvalidModel, match="144 is not the 16") as caught:
        read_panning()
    assert caught.value.file == "processor_config.json"
