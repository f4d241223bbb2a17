"""What the process that decodes images is asked, and what it answers. Pure; imports no decoder."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

COMMAND: Final = (sys.executable, "-m", "mlxd_worker.vision.image_process")
GOOD: Final = b"+"
BAD: Final = b"-"
NAME_NBYTES: Final = 32
"""Of an image's name, before its pixels in an answer."""


def question_of(content: bytes, *, media_type: str, target: dict[str, Any]) -> bytes:
    """Return what the process is asked about a file."""
    return json.dumps({"media_type": media_type, "target": target}).encode() + b"\n" + content


def parts_of(question: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a question's header, and the file's bytes."""
    line, _, content = question.partition(b"\n")
    return json.loads(line), content
