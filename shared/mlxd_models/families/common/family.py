"""What one family of models hands to the registry: how to read its config, and what follows.

Invariants:
- `tensors` and `footprint` are computed from the config alone, before any weight is read.
- Every stored tensor is one of `tensors` or the file is refused; every required one is present.
- How a model is built is not known here: `builder` names the module for whoever has MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlxd_models.families.common.footprint import Footprint
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.files.weights import TensorFact

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """One family of models under one config type."""

    builder: str
    """The module of the worker whose `build` makes its models; imported when one is loaded."""
    parse: Callable[[Mapping[str, Any]], Config]
    tensors: Callable[[Config], tuple[TensorSpec, ...]]
    footprint: Callable[[Config], Footprint]
    model_type: str = ""
    """Where config.json has it: no other architecture of this type is left to mlx-lm."""
    name_of: Callable[[str], str | None] = str
    """By what name `tensors` knows a stored tensor; None for one that is known, and left unread."""
    restore: Callable[[Config, Sequence[TensorFact]], tuple[TensorSpec, ...]] | None = None
    """Where what is stored is read by other rules than these: checks it all, nothing being read,
    and returns what will be made of it, packed as it will be."""
