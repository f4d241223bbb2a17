"""How often Python functions are called: work measured without a clock, whoever else runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import cast


def calls_of(action: Callable[[], object], function: Callable[..., object] | None = None) -> int:
    """Return how many calls of one function, by default of any, an action makes on its thread."""
    code = None if function is None else cast("FunctionType", function).__code__
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        del argument
        count += event == "call" and code in (None, frame.f_code)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
