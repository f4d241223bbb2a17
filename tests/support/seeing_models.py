"""The tiny models that see, by family: what a test of served pictures is run for.

A family is one more line of `SEEING`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.support.gemma3_cases import write_marked_model
from tests.support.qwen3_vl_cases import stacked_config
from tests.support.seeing import write_placed_model, write_seeing_model
from tests.support.seeing_shapes import write_shaped_model, write_shaped_settings


def write_stacked_model(folder: Path) -> Path:
    """Write a tiny Qwen3-VL with tokenizer, template and image settings; return `folder`."""
    write_placed_model(folder, stacked_config())
    return write_shaped_settings(folder)


SEEING: Final[Mapping[str, Callable[[Path], Path]]] = MappingProxyType(
    {
        "llava": write_seeing_model,
        "qwen2.5-vl": write_shaped_model,
        "qwen3-vl": write_stacked_model,
        "gemma3": write_marked_model,
    }
)
"""What writes a model into a folder, and returns it."""
