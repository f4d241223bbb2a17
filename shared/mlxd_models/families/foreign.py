"""Models that mlx-lm alone has an architecture for, by what config.json and headers say of them.

Invariants:
- What names alone can tell is refused here, for who plans as for who loads. The rest only mlx-lm
  knows: whoever has it puts its own reading in the place of this one.
- Sizes are the most that the names may mean (`sizes.zoo_sizes`): no plan is too small.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import Fields, invalid
from mlxd_models.families.common.packing import parse_packing
from mlxd_models.families.foreign_seeing import seeing_anywhere, seeing_here
from mlxd_models.families.foreign_tensors import (
    ForeignConfig,
    check_counts,
    foreign_specs,
    no_tensors,
)
from mlxd_models.sizes.zoo_sizes import zoo_cache_sizes, zoo_context, zoo_pass_sizes
from mlxd_models.sizes.zoo_types import ZOO_EXTRA, ZOO_VERSION, zoo_type

REFUSED: Final[Mapping[str, str]] = {
    "plamo3": "reads prompts by a window one wider than that by which it goes on",
}
"""Types whose models in mlx-lm contradict themselves, so that nobody knows what is right."""

VOCAB_MIN: Final[Mapping[str, int]] = {"phi3small": 100_352}
"""Types that write to ids of their own, beyond the end of logits for a smaller vocabulary."""


def parse_foreign(config: Mapping[str, Any]) -> ForeignConfig:
    """Return what is known of a config without mlx-lm.

    Raises:
        InvalidModel: mlx-lm has no such model; the config brings code along, names absurdly many
            parts or packs in an unknown way; or the model would write beyond its logits.
    """
    name = zoo_type(config)
    if name is None:
        problem = f"{config.get('model_type')!r} is not one of mlx-lm's models"
        raise invalid("model_type", problem)
    if config.get("model_file") is not None:
        raise invalid("model_file", "names code to be run; mlxd runs none that a model brings")
    if name in REFUSED:
        raise invalid("model_type", f"mlx-lm's {name} {REFUSED[name]}")
    check_counts(config)
    least = VOCAB_MIN.get(name, 1)
    if zoo_pass_sizes(config).vocab < least:
        raise invalid("vocab_size", f"mlx-lm's {name} needs {least} tokens at least")
    return ForeignConfig(name, config, parse_packing(Fields(config)))


def parse_installed(config: Mapping[str, Any]) -> ForeignConfig:
    """Return the same where this installation has mlx-lm; raises as `check_installed`, too."""
    stated = parse_foreign(config)
    check_installed(stated.name, installed_version())
    return stated


def check_installed(name: str, installed: str | None) -> None:
    """Raise InvalidModel, naming what to install, unless mlx-lm is there in its one version."""
    extra = f"install mlxd[{ZOO_EXTRA}]"
    if installed is None:
        problem = f"{name!r} is served through mlx-lm alone, which is not installed: {extra}"
        raise invalid("model_type", problem)
    if installed != ZOO_VERSION:
        problem = f"{name!r} is served through mlx-lm {ZOO_VERSION} alone, {installed} is installed"
        raise invalid("model_type", f"{problem}: {extra}")


def installed_version() -> str | None:
    """Return which mlx-lm is installed; None: none."""
    try:
        return importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        return None


def foreign_footprint(config: ForeignConfig) -> Footprint:
    """Return the most that the model may take besides its weights."""
    values = config.values
    return Footprint(zoo_context(values), zoo_cache_sizes(values), zoo_pass_sizes(values))


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
