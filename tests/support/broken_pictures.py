"""Files that are no pictures: cut, overwritten, of other kinds, lying about themselves, or huge."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from itertools import count

from mlxd_shared import config
from mlxd_worker.vision.decoding import Refused, Target, decode_image
from tests.support.seeing import encode_image, picture

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
_TARGET = Target(24, 24, 3)


def png_of(width: int, height: int, body: bytes = b"") -> bytes:
    """Return a PNG whose header says so, and whose pixels are `body`."""

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp_of(width: int, height: int) -> bytes:
    """Return a WebP of one pixel whose header says so."""
    whole = encode_image(picture(1, width=1, height=1), "WEBP", lossless=True)
    assert whole[12:16] == b"VP8L"
    size = (width - 1) | (height - 1) << 14
    return whole[:21] + size.to_bytes(4, "little") + whole[25:]


def damaged_files(seed: int) -> Iterator[bytes]:
    """Yield files without end: cut, with wrong bytes, or with another beginning. Some are read."""
    draws = random.Random(seed)
    whole = [encode_image(picture(number), kind) for number in range(3) for kind in KINDS]
    for number in count():
        content = bytearray(whole[number % len(whole)])
        if number % 3 == 0:
            del content[draws.randrange(1, len(content) // 2) :]
        elif number % 3 == 1:
            for _ in range(24):
                content[draws.randrange(len(content))] = draws.randrange(256)
        else:
            content[: draws.randrange(4, 20)] = draws.randbytes(12)
        yield bytes(content)


def lying_files() -> list[tuple[bytes, str]]:
    """Return files, and what each is said to be: bombs, huge ones, lies about kind and size."""
    side, most = config.IMAGE_SIDE_MAX, config.IMAGE_BYTES_MAX
    noise = random.Random(1).randbytes(most - 4096)
    other = ("image/png", "image/jpeg", "image/webp", "image/gif")
    lies = [
        (encode_image(picture(at), kind), other[(KINDS.index(kind) + 1) % 4])
        for at, kind in enumerate(KINDS)
    ]
    bombs = [
        png_of(8192, 8192, zlib.compress(bytes(1 << 20))),
        png_of(side + 1, 1), png_of(1, side + 1), png_of(8000, 4000, zlib.compress(b"")),
        webp_of(8192, 8192), webp_of(side, side), b"\xff\xd8\xff" + noise, b"GIF89a" + noise,
        png_of(600, 600, noise), b"RIFF" + noise, noise, b"", b"x", b"%PDF-1.7", b"<svg/>",
        b"\0\0\0\x18ftypmp42", b"RIFF\0\0\0\0WAVE",
        encode_image(picture(1), "GIF", save_all=True, append_images=[picture(2)]),
    ]  # fmt: skip
    return [*lies, *((bomb, "") for bomb in bombs)]


def refused_files(count: int, *, seed: int = 7) -> list[tuple[bytes, str]]:
    """Return so many files that are refused, and what each is said to be."""
    files = lying_files()
    for content in damaged_files(seed):
        if len(files) >= count:
            return files[:count]
        try:
            decode_image(content, "", _TARGET)
        except Refused:
            files.append((content, ""))
    return files
