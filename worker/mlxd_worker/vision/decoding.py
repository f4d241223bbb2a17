"""From an image's file to the pixels that a model sees. Runs in the process of `image_process`.

Invariants:
- What a header says of width and height is checked before anything is decoded: by Pillow (13) as
  it reads the header, because its WebP decoder has room for all pixels from then on; and here.
- Of a photograph that is followed by others in its file (MPO), as cameras write, it is the first.
- Pixels are those that transformers' processors have before they scale them: turned as the camera
  says, three colours without transparency, resized by Pillow, the middle cut out.
- An image is named by its pixels as they are decoded, before they are resized: the same picture in
  another file has the same name, and one pixel changes it.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from PIL import Image, ImageOps

from mlxd_shared import config
from mlxd_shared.domain.chats import IMAGE_FORMATS
from mlxd_worker.vision.asking import NAME_NBYTES

_MPO: Final = "MPO"
"""What Pillow calls a JPEG that has an index of further ones behind it."""


class Refused(Exception):
    """A file that is no image that is read; says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an image is to become; see `ImageSettings`."""

    side: int
    shorter_side: int | None
    resample: int


def decode_image(content: bytes, media_type: str, target: Target) -> tuple[bytes, bytes]:
    """Return an image's name, and its pixels: `side` rows of as many, 8 bits a colour.

    media_type: what the file must be; empty: any of those that are read.

    Raises:
        Refused: it is no such file, is damaged, or is beyond a bound.
    """
    Image.MAX_IMAGE_PIXELS = config.IMAGE_PIXELS_MAX // 2  # Pillow refuses more than twice as many
    try:
        with warnings.catch_warnings(action="ignore"), _open(content) as image:
            _check_header(image, media_type)
            image.load()
            upright = ImageOps.exif_transpose(image).convert("RGB")
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
    name.update(upright.tobytes())
    return name.digest(), _fit(upright, target).tobytes()


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


def _short(error: Exception) -> str:
    """Return what Pillow says, without the object that it names by its address."""
    text = str(error) or type(error).__name__
    return text.split(" <", maxsplit=1)[0][: config.CHAT_PROBLEM_CHARS_MAX]
