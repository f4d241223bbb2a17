"""Random models to prove the engine on: written as checkpoints, and loaded as any other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.registry import REGISTRY, architecture_of, find_family
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.devices import DeviceKind
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import DTYPES, inspect_model, load_model
from mlxd_worker.proof.families import config_of, routes

SPREAD: Final = 1.5
"""Of the weights: wide enough that greedy output does not fall into a loop at once."""
_WEIGHTS_FILE: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is proved, made anew wherever a switch decides how it is built."""

    name: str
    kind: DeviceKind
    make: Callable[[], Model]
    routes: bool = False
    """Whether it has experts."""


def form_on(kind: DeviceKind) -> FloatType:
    """Return the form in which weights live where nobody asks for another one."""
    return FloatType.F32 if kind is DeviceKind.CPU else FloatType.BF16


def make_subject(
    architecture: str, folder: Path, kind: DeviceKind, sizes: Mapping[str, Any] | None = None
) -> Subject:
    """Write a random model into `folder`, and return what loads it."""
    config = config_of(architecture) if sizes is None else config_of(architecture, sizes)
    form = form_on(kind)
    write_random(folder, config, form)
    make = partial(load_model, inspect_model(folder), form=form, progress=_ignore)
    return Subject(architecture, kind, make, routes(architecture))


def write_random(folder: Path, config: Mapping[str, Any], form: FloatType) -> None:
    """Write config and every tensor that it requires: norms near one, decays slow and fast."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    family = find_family(REGISTRY, architecture_of(config))
    specs = [spec for spec in family.tensors(family.parse(config)) if spec.required]
    keys = mx.random.split(mx.random.key(len(specs)), len(specs))
    tensors = {
        spec.name: _draw(spec, key).astype(DTYPES[FloatType(spec.dtype or form)])
        for spec, key in zip(specs, keys, strict=True)
    }
    mx.save_safetensors(str(folder / _WEIGHTS_FILE), tensors)


def _draw(spec: TensorSpec, key: mx.array) -> mx.array:
    noise = mx.random.normal(spec.shape, key=key)
    if "norm" in spec.name:
        return 1 + 0.1 * noise
    if spec.name.endswith("A_log"):
        # A token leaves between a hundredth and nearly all of what was there.
        return mx.log(mx.random.uniform(0.002, 4.0, spec.shape, key=key))
    if spec.name.endswith("bias"):
        return 0.1 * noise
    return noise * (SPREAD / math.sqrt(spec.shape[-1]))


def _ignore(read_nbytes: int, total_nbytes: int) -> None:
    """Take a load's progress and do nothing with it."""
