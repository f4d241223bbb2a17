"""What the process that decodes images is asked, and what it answers. Pure; imports no decoder."""

from __future__ import annotations

import json
import sys
from struct import Struct
from typing import Any, Final

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.vision.image_process")
GOOD: Final = b"+"
BAD: Final = b"-"
NAME_NBYTES: Final = 32
"""Of an image's name, before its pixels in an answer."""
Bytes = bytes | memoryview
_GRID: Final = Struct("<II")
"""Rows and columns of places, between both where an image keeps its shape."""


def question_of(content: bytes, *, media_type: str, target: dict[str, Any]) -> bytes:
    """Return what the process is asked about a file."""
    return json.dumps({"media_type": media_type, "target": target}).encode() + b"\n" + content


def grid_bytes(rows: int, columns: int) -> bytes:
    """Return what comes before the pixels of an image that keeps its shape."""
    return _GRID.pack(rows, columns)


def grid_of(shown: Bytes) -> tuple[tuple[int, int], Bytes]:
    """Return such an image's rows and columns, and its pixels; of a shorter answer, none.

    Of a view the pixels are one, too: nothing is copied.
    """
    if len(shown) < _GRID.size:
        return (0, 0), b""
    rows, columns = _GRID.unpack_from(shown)
    return (rows, columns), shown[_GRID.size :]


def parts_of(question: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a question's header, and the file's bytes."""
    line, _, content = question.partition(b"\n")
    return json.loads(line), content
