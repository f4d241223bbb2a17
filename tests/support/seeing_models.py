"""The tiny models that see, by family: what a test of served pictures is run for.

A family is one more line of `SEEING`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.support.seeing import write_seeing_model
from tests.support.seeing_shapes import write_shaped_model

SEEING: Final[Mapping[str, Callable[[Path], Path]]] = MappingProxyType(
    {"llava": write_seeing_model, "qwen2.5-vl": write_shaped_model}
)
"""What writes a model into a folder, and returns it."""
