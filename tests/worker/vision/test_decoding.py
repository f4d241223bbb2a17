"""Files to pixels: as transformers' processors make them, and a sentence for every bad file."""

from __future__ import annotations

import io
import zlib
from itertools import islice
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlxd_shared import config
from mlxd_worker.vision.decoding import Refused, Target, decode_image
from tests.support.broken_pictures import damaged_files, png_of, webp_of
from tests.support.gemma3_cases import panning_settings
from tests.support.seeing import change_pixel, encode_image, image_settings, picture

SIDE = 24
CLIP, SIGLIP = Target(SIDE, SIDE, 3), Target(SIDE, None, 3)
TARGETS = {"clip": CLIP, "siglip": SIGLIP, "gemma3": Target(SIDE, None, 2)}
SIZES = ((24, 24), (31, 40), (200, 37), (9, 80), (333, 250), (24, 300), (5, 5), (64, 63), (1, 1),
         (641, 480))  # fmt: skip
BROKEN = 500


def pixels_of(content: bytes, target: Target = CLIP, media_type: str = "") -> np.ndarray[Any, Any]:
    """Return what a file becomes."""
    _, colours = decode_image(content, media_type, target)
    return np.frombuffer(colours, np.uint8).reshape(SIDE, SIDE, 3)


def refusal(content: bytes, media_type: str = "") -> str:
    """Return why a file is refused."""
    with pytest.raises(Refused) as caught:
        decode_image(content, media_type, CLIP)
    return str(caught.value)


def transformers_pixels(image: Image.Image, tower: str) -> np.ndarray[Any, Any]:
    """Return 8-bit pixels as transformers' own processor on Pillow makes them."""
    from transformers.models.clip import image_processing_pil_clip as clip  # noqa: PLC0415
    from transformers.models.gemma3 import image_processing_pil_gemma3 as gemma3  # noqa: PLC0415
    from transformers.models.siglip import image_processing_pil_siglip as siglip  # noqa: PLC0415

    kinds = {
        "clip": clip.CLIPImageProcessorPil,
        "siglip": siglip.SiglipImageProcessorPil,
        "gemma3": gemma3.Gemma3ImageProcessorPil,
    }
    is_gemma = tower == "gemma3"
    settings = panning_settings(SIDE) if is_gemma else image_settings(SIDE, tower=tower)
    del settings["image_processor_type"]
    settings |= {"do_rescale": False, "do_normalize": False}
    made = kinds[tower](**settings)(image, return_tensors="np")["pixel_values"][0]
    return np.asarray(made).transpose(1, 2, 0)


@pytest.mark.parametrize("tower", ["clip", "siglip", "gemma3"])
@pytest.mark.parametrize("size", SIZES)
def test_pixels_equal_transformers(tower: str, size: tuple[int, int]) -> None:
    """Of every shape, wide, tall and tiny: within one step of 8 bits."""
    image = picture(3, width=size[0], height=size[1])
    expected = transformers_pixels(image, tower)
    made = pixels_of(encode_image(image), TARGETS[tower])
    assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_four_formats_are_read(kind: str) -> None:
    """Each by its own name; said to be another, it is refused."""
    content = encode_image(picture(1), kind)
    assert pixels_of(content, media_type=f"image/{kind.lower()}").std() > 10
    wrong = "image/gif" if kind == "PNG" else "image/png"
    assert f"and is said to be {wrong}" in refusal(content, wrong)


def test_a_photograph_with_others_behind_it_is_the_first() -> None:
    """Cameras write a JPEG with an index of more (MPO): it is a JPEG, and its first frame."""
    first, others = picture(1), [picture(2), picture(3)]
    content = encode_image(first, "MPO", save_all=True, append_images=others, quality=95)
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "MPO"
    alone = pixels_of(encode_image(first, "JPEG", quality=95))
    assert (pixels_of(content, media_type="image/jpeg") == alone).all()


def test_colours_and_turns_are_settled() -> None:
    """Palettes, greys and transparency become three colours; a camera's turn is undone."""
    image = picture(2, width=40, height=40)
    for mode in ("P", "L", "RGBA", "1", "LA", "I;16"):
        assert (
            pixels_of(encode_image(image.convert("L" if mode == "I;16" else mode))).shape[-1] == 3
        )
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = pixels_of(encode_image(image, exif=exif))
    assert (turned == pixels_of(encode_image(image.rotate(-90)))).all()


def test_an_image_is_named_by_what_it_shows() -> None:
    """Alike in every lossless file; otherwise after the least change of one pixel."""
    image = picture(4, width=300, height=200)
    names = {decode_image(encode_image(image, **how), "", CLIP)[0] for how in (
        {"kind": "PNG"}, {"kind": "PNG", "compress_level": 1}, {"kind": "WEBP", "lossless": True},
    )}  # fmt: skip
    assert len(names) == 1
    assert decode_image(encode_image(change_pixel(image)), "", CLIP)[0] not in names


def test_a_header_is_judged_before_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many pixels, or a side too long, are refused by their numbers, however small the file;
    no decoder of WebP, which has room for all pixels at once, is made."""
    most = config.IMAGE_PIXELS_MAX
    bomb = png_of(8192, 8192, zlib.compress(bytes(1 << 20)))
    assert refusal(bomb) == f"too many pixels; at most {most}"
    assert "pixels; at most" not in refusal(png_of(8192, most // 8192))
    with monkeypatch.context() as patched:
        made: list[bytes] = []
        patched.setattr("PIL._webp.WebPAnimDecoder", made.append)
        assert refusal(webp_of(8192, 8192)) == f"too many pixels; at most {most}"
        assert not made
    side = config.IMAGE_SIDE_MAX
    assert refusal(png_of(side + 1, 1)) == f"{side + 1} x 1 pixels; a side has at most {side}"
    assert "several frames" in refusal(
        encode_image(picture(1), "GIF", save_all=True, append_images=[picture(2)])
    )
    assert "too long for its width" in refusal(encode_image(picture(1, width=1, height=9000)))


def test_broken_and_lying_files_are_refused() -> None:
    """Cut, overwritten, of other kinds, or empty: 500 files, each a sentence and no other error."""
    refused = 0
    for content in islice(damaged_files(7), BROKEN):
        reason = _reason_of(content)
        refused += bool(reason)
        assert len(reason) < 500
        assert "0x" not in reason
    assert refused > BROKEN // 2
    for other in (b"", b"x", b"%PDF-1.7", b"<svg/>", b"BM" + bytes(60), b"II*\0" + bytes(60)):
        assert refusal(other).startswith("no image that can be read")


def _reason_of(content: bytes) -> str:
    """Return why a file is refused; empty where it is read after all."""
    try:
        pixels_of(content)
    except Refused as error:
        return str(error)
    return ""
