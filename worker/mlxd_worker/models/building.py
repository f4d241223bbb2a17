"""What builds a model that `mlxd_models` describes: where its tensors come from, and a function.

Invariants:
- A builder takes every required tensor of the description, and keeps nothing else of the weights.
- Builders are found by the module that a description names, which is imported for its first model.
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

from mlxd_models.families.common.family import Family
from mlxd_worker.models.base import Model
from mlxd_worker.models.weights.reader import Reader

Weights = Reader
"""Where an architecture takes its tensors from while it is built."""

Builder = Callable[[Any, Weights], Model]
"""Builds a model of the config that its family parsed; takes all weights.

Raises InvalidModel where a file cannot be read after all.
"""


def builder_of(family: Family[Any]) -> Builder:
    """Return what builds a family's models."""
    return cast("Builder", importlib.import_module(family.builder).build)
