"""Models that mlx-lm alone has an architecture for, by what config.json and headers say of them.

Invariants:
- What names alone can tell is refused here, for who plans as for who loads. The rest only mlx-lm
  knows: whoever has it puts its own reading in the place of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.family import Family
from mlxd_models.families.common.fields import invalid
from mlxd_models.families.foreign_parts import (
    ForeignConfig,
    Library,
    check_installed,
    foreign_footprint,
    installed_version,
    keep_config,
)
from mlxd_models.families.foreign_seeing import seeing_anywhere, seeing_here
from mlxd_models.families.foreign_tensors import foreign_specs, no_tensors
from mlxd_models.sizes.zoo_sizes import zoo_pass_sizes
from mlxd_models.sizes.zoo_types import ZOO_EXTRA, ZOO_VERSION, zoo_type

MLX_LM: Final = Library("mlx-lm", ZOO_VERSION, ZOO_EXTRA)

REFUSED: Final[Mapping[str, str]] = {
    "plamo3": "reads prompts by a window one wider than that by which it goes on",
}
"""Types whose models in mlx-lm contradict themselves, so that nobody knows what is right."""

VOCAB_MIN: Final[Mapping[str, int]] = {"phi3small": 100_352}
"""Types that write to ids of their own, beyond the end of logits for a smaller vocabulary."""


def parse_foreign(config: Mapping[str, Any]) -> ForeignConfig:
    """Return what is known of a config without mlx-lm.

    Raises:
        InvalidModel: as `keep_config`; mlx-lm has no such model, or the model contradicts itself
            or would write beyond its logits.
    """
    name = zoo_type(config)
    if name is None:
        problem = f"{config.get('model_type')!r} is not one of mlx-lm's models"
        raise invalid("model_type", problem)
    if name in REFUSED:
        raise invalid("model_type", f"mlx-lm's {name} {REFUSED[name]}")
    kept = keep_config(name, config)
    least = VOCAB_MIN.get(name, 1)
    if zoo_pass_sizes(config).vocab < least:
        raise invalid("vocab_size", f"mlx-lm's {name} needs {least} tokens at least")
    return kept


def parse_installed(config: Mapping[str, Any]) -> ForeignConfig:
    """Return the same where this installation has mlx-lm; raises as `check_installed`, too."""
    stated = parse_foreign(config)
    check_installed(MLX_LM, stated.name, installed_version(MLX_LM))
    return stated


FOREIGN: Final = Family(
    builder="mlxd_worker.models.zoo.adapter",
    parse=parse_foreign,
    tensors=no_tensors,
    footprint=foreign_footprint,
    restore=foreign_specs,
    seeing=seeing_anywhere,
)
"""Whoever loads them has mlx-lm, or not: it is in another installation."""

INSTALLED: Final = replace(FOREIGN, parse=parse_installed, seeing=seeing_here)
"""Whoever loads them is of this installation."""
