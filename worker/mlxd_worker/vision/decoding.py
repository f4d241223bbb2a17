"""From an image's file to the pixels that a model sees. Runs in the process of `image_process`.

Invariants:
- What a header says of width and height is checked before anything is decoded: by Pillow (13) as
  it reads the header, because its WebP decoder has room for all pixels from then on; and here.
- Of a photograph that is followed by others in its file (MPO), as cameras write, it is the first.
- Pixels are those that transformers' processors have before they scale them: turned as the camera
  says, three colours without transparency, resized by Pillow, the middle cut out.
- What is decoded is there once, and twice while it is turned or its colours change: no copy of it
  is made besides.
- An image is named by its pixels as they are decoded, before they are resized: the same picture in
  another file has the same name, and one pixel changes it.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from PIL import Image, ImageOps

from mlxd_shared import config
from mlxd_shared.domain.chats import IMAGE_FORMATS
from mlxd_worker.vision.asking import NAME_NBYTES, grid_bytes

_MPO: Final = "MPO"
"""What Pillow calls a JPEG that has an index of further ones behind it."""
_STRIP_PIXELS: Final = 1 << 18
ASPECT_MAX: Final = 200
"""How much longer one side may be where an image keeps its shape: as its processor has it."""


class Refused(Exception):
    """A file that is no image that is read; says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an image is to become; see `ImageSettings`."""

    side: int
    shorter_side: int | None
    resample: int
    pixels_min: int | None = None
    pixels_max: int | None = None
    growth: str = "not"
    """How one that keeps its shape grows first if it is too narrow for a place; see `Growth`."""
    places_max: int | None = None
    """How many places one that keeps its shape takes at most; None: `IMAGE_PLACES_MAX`."""


def decode_image(content: bytes, media_type: str, target: Target) -> tuple[bytes, bytes]:
    """Return an image's name, and its pixels: `side` rows of as many, 8 bits a colour.

    Where it keeps its shape, how many rows and columns of such squares there are is before them.
    media_type: what the file must be; empty: any of those that are read.

    Raises:
        Refused: it is no such file, is damaged, or is beyond a bound.
    """
    Image.MAX_IMAGE_PIXELS = config.IMAGE_PIXELS_MAX // 2  # Pillow refuses more than twice as many
    try:
        with warnings.catch_warnings(action="ignore"), _open(content) as image:
            _check_header(image, media_type)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            upright: Image.Image = image if image.mode == "RGB" else image.convert("RGB")
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise Refused(f"too many pixels; at most {config.IMAGE_PIXELS_MAX}") from None
    except MemoryError:
        raise Refused("takes more memory than there is for it") from None
    except Exception as error:
        known = ", ".join(IMAGE_FORMATS)
        raise Refused(f"no image that can be read ({known}): {_short(error)}") from error
    name = blake2b(digest_size=NAME_NBYTES)
    name.update(b"%d %d " % upright.size)
    for strip in _strips(upright):
        name.update(strip)
    seen = _fit(upright, target)
    del image, upright
    grid = b""
    if target.pixels_max is not None:
        grid = grid_bytes(seen.height // target.side, seen.width // target.side)
    return name.digest(), b"".join((grid, *_strips(seen)))


def _strips(image: Image.Image) -> Iterator[bytes]:
    """Yield an image's pixels row by row, some rows at a time."""
    rows = max(_STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height))).tobytes()


def _open(content: bytes) -> Image.Image:
    """Return an image of which no more than its header has been read."""
    return Image.open(io.BytesIO(content), formats=tuple(IMAGE_FORMATS))


def _check_header(image: Image.Image, media_type: str) -> None:
    """Refuse what the header says, before anything behind it is looked at."""
    kind = IMAGE_FORMATS["JPEG" if image.format == _MPO else str(image.format)]
    if media_type and media_type != kind:
        raise Refused(f"is {kind}, and is said to be {media_type}")
    width, height = image.size
    if max(width, height) > config.IMAGE_SIDE_MAX:
        raise Refused(f"{width} x {height} pixels; a side has at most {config.IMAGE_SIDE_MAX}")
    if min(width, height) < 1:
        raise Refused(f"{width} x {height} pixels")
    if image.format != _MPO and getattr(image, "is_animated", False):
        raise Refused("has several frames; one is read")


def _fit(image: Image.Image, target: Target) -> Image.Image:
    """Return an image as it is seen."""
    side, shorter = target.side, target.shorter_side
    if target.pixels_max is not None:
        size = shaped_size(*image.size, target)
        return image.resize(size, Image.Resampling(target.resample))
    if shorter is None:
        return image.resize((side, side), Image.Resampling(target.resample))
    width, height = image.size
    longer = int(shorter * max(width, height) / min(width, height))
    if longer > config.IMAGE_SIDE_MAX or longer * shorter > config.IMAGE_PIXELS_MAX:
        raise Refused(f"{width} x {height} pixels: too long for its width")
    size = (shorter, longer) if width <= height else (longer, shorter)
    resized = image.resize(size, Image.Resampling(target.resample))
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return resized.crop((left, top, left + side, top + side))


def shaped_size(width: int, height: int, target: Target) -> tuple[int, int]:
    """Return the width and height of an image that keeps its shape: multiples of `side`.

    The nearest ones, or where these have too many pixels the next smaller ones of the image made
    smaller as a whole; where too few, the next larger ones. As Qwen2-VL's processor
    rounds, and those that are made like it.

    Raises:
        Refused: it is too long for its width, or has more places than an image may have.
    """
    width, height = _grow(width, height, target)
    if max(width, height) > ASPECT_MAX * min(width, height):
        raise Refused(f"{width} x {height} pixels: too long for its width")
    side, least, most = target.side, target.pixels_min or 1, target.pixels_max or 1
    columns, rows = round(width / side), round(height / side)
    pixels = rows * columns * side**2
    if pixels > most:
        factor = math.sqrt(width * height / most)
        columns, rows = (max(1, math.floor(each / factor / side)) for each in (width, height))
    elif pixels < least:
        factor = math.sqrt(least / (width * height))
        columns, rows = (math.ceil(each * factor / side) for each in (width, height))
    places_max = target.places_max or config.IMAGE_PLACES_MAX
    if rows * columns > places_max:  # the least is as much as may be, and sides were rounded up
        factor = math.sqrt(width * height / (places_max * side**2))
        columns, rows = (max(1, math.floor(each / factor / side)) for each in (width, height))
    if rows * columns > places_max:
        raise Refused(f"takes {rows * columns} tokens; an image takes at most {places_max}")
    return columns * side, rows * side


def _grow(width: int, height: int, target: Target) -> tuple[int, int]:
    """Return the size of an image that is as long as a place both ways, where it grows to that.

    As GLM-4V's processor, and PaddleOCR-VL's, do before they round.
    """
    side = target.side
    if target.growth == "whole" and min(width, height) < side:
        scale = max(side / height, side / width)
        return int(width * scale), int(height * scale)
    if target.growth == "by side":
        if height < side:
            width, height = round(width * side / height), side
        if width < side:
            width, height = side, round(height * side / width)
    return width, height


def _short(error: Exception) -> str:
    """Return what Pillow says, without the object that it names by its address."""
    text = str(error) or type(error).__name__
    return text.split(" <", maxsplit=1)[0][: config.CHAT_PROBLEM_CHARS_MAX]
