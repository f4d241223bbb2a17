"""What models of other libraries have in common: a library, and a config that is not taken apart.

Invariants:
- A library is there in its one version, or what it alone can serve is refused by name.
- Sizes are the most that the names may mean (`sizes.zoo_sizes`): no plan is too small.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlxd_models.families.common.family import Footprint
from mlxd_models.families.common.fields import Fields, invalid
from mlxd_models.families.common.packing import Packings, parse_packing
from mlxd_models.sizes.zoo_sizes import zoo_cache_sizes, zoo_context, zoo_pass_sizes

COUNT_MAX: Final = 4096
"""Layers, heads or experts that a config may name."""

_COUNTED = ("layer", "expert", "head")
_SIZED = ("dim", "size", "vocab", "rank", "token")


@dataclass(frozen=True, slots=True)
class Library:
    """Another library that models are served through."""

    distribution: str
    version: str
    """The one that the adapter was held to."""
    extra: str
    """What `pip install mlxd[...]` takes for it."""


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A config that is not taken apart."""

    name: str
    """The library's module."""
    values: Mapping[str, Any]
    packings: Packings | None


def installed_version(library: Library) -> str | None:
    """Return which version of a library is installed; None: none."""
    try:
        return importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_installed(library: Library, name: str, installed: str | None) -> None:
    """Raise InvalidModel, naming what to install, unless a library is there in its one version.

    name: of the type that it serves. installed: as `installed_version` returns.
    """
    served, extra = f"{name!r} is served through {library.distribution}", library.extra
    if installed is None:
        problem = f"{served} alone, which is not installed"
    elif installed != library.version:
        problem = f"{served} {library.version} alone, {installed} is installed"
    else:
        return
    raise invalid("model_type", f"{problem}: install mlxd[{extra}]")


def keep_config(name: str, config: Mapping[str, Any]) -> ForeignConfig:
    """Return a config as it is, for a library's module `name`.

    Raises:
        InvalidModel: it brings code along, names absurdly many parts, or packs in an unknown way.
    """
    if config.get("model_file") is not None:
        raise invalid("model_file", "names code to be run; mlxd runs none that a model brings")
    _check_counts(config)
    return ForeignConfig(name, config, parse_packing(Fields(config)))


def foreign_footprint(config: ForeignConfig) -> Footprint:
    """Return the most that the model may take besides its weights."""
    values = config.values
    return Footprint(zoo_context(values), zoo_cache_sizes(values), zoo_pass_sizes(values))


def _check_counts(values: Mapping[str, Any]) -> None:
    """Refuse numbers of parts that would keep Python busy: a model is made of so many objects."""
    none: tuple[str, ...] = ()
    left = [(none, values)]  # not by recursion: objects may be nested deeper than calls
    while left:
        path, part = left.pop()
        for key, value in part.items():
            if isinstance(value, Mapping):
                left.append(((*path, key), value))
            counts = any(word in key for word in _COUNTED) and not any(w in key for w in _SIZED)
            if counts and type(value) is int and value > COUNT_MAX:
                raise invalid(".".join((*path, key)), f"{value} is above {COUNT_MAX}")
