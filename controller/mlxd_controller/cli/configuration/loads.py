"""`[models."NAME"]`: the folders that a server offers, and what loads of a model begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxd_controller.cli.configuration.keys import MODELS
from mlxd_controller.cli.configuration.reading import Configuration
from mlxd_controller.cli.options import read_bias
from mlxd_shared.domain import requests as r
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.units import parse_bytes, parse_duration

_KEYS = {
    "context_length": "context",
    "rows_max": "rows",
    "prefix_cache_bytes": "prefix_cache",
}
"""Of values that the file calls otherwise than a request does: as the options of `mlxd load`."""


def folders_of(configuration: Configuration) -> tuple[tuple[str, Path], ...]:
    """Return the models that the file gives a path, by name.

    Raises:
        InvalidRequest: one is no folder; names the file and the key.
    """
    tables = configuration.models.items()
    folders = {name: Path(str(table["path"])) for name, table in tables if "path" in table}
    for name, folder in folders.items():
        if not folder.is_dir():
            field = f'{configuration.path}: {MODELS}."{name}".path'
            raise InvalidRequest.of(field, f"{folder} is not a folder")
    return tuple(folders.items())


def specs_of(configuration: Configuration) -> dict[str, r.LoadSpec]:
    """Return what a load of each model begins with.

    Raises:
        InvalidRequest: a value is out of range; names the file and the key.
    """
    specs: dict[str, r.LoadSpec] = {}
    for name, table in configuration.models.items():
        prefix = f'{configuration.path}: {MODELS}."{name}"'
        try:
            spec = _spec_of(table)
        except ValueError as error:
            raise InvalidRequest.of(f"{prefix}.logit_bias", str(error)) from error
        violations = [
            *r.load_violations(spec, prefix=prefix),
            *r.sampling_violations(spec.sampling, prefix=prefix),
            *r.check_range(f"{prefix}.priority", spec.priority, *r.INT32),
        ]
        if violations:
            first = violations[0]
            own = first.field.removeprefix(f"{prefix}.")
            field = f"{prefix}.{_KEYS.get(own, own)}"
            raise InvalidRequest((replace(first, field=field),))
        specs[name] = spec
    return specs


def _spec_of(table: Mapping[str, Any]) -> r.LoadSpec:
    """Return the values of a table, each of its kind already."""
    drawing = {name: table[name] for name in r.SAMPLING_RANGES if name in table}
    biases = tuple(read_bias(text) for text in table.get("logit_bias", ()))
    return r.LoadSpec(
        context_length=table.get("context"),
        rows_max=table.get("rows"),
        weights=r.Weights(table.get("weights", r.Weights.AUTO.value)),
        sampling=r.SamplingOptions(**drawing, logit_bias=biases),
        keep_alive_s=parse_duration(table["keep_alive"]) if "keep_alive" in table else None,
        pinned=table.get("pin"),
        priority=table.get("priority"),
        kv_format=r.KVFormat(table["kv_format"]) if "kv_format" in table else None,
        prefix_cache_nbytes=parse_bytes(table["prefix_cache"]) if "prefix_cache" in table else None,
        ranks=table.get("ranks") or None,
    )
