"""What loads fixed for a model: how a later load's options meet those in force. Pure."""

from __future__ import annotations

from mlxd_controller.core.phases import Joinable
from mlxd_controller.core.state import Model
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import LoadSpec, Weights, merge


def merged(given: LoadSpec, before: LoadSpec) -> LoadSpec:
    """Return `given`, with what it leaves open taken from `before`."""
    return LoadSpec(
        context_length=given.context_length or before.context_length,
        rows_max=given.rows_max or before.rows_max,
        weights=before.weights if given.weights is Weights.AUTO else given.weights,
        sampling=merge(given.sampling, before.sampling),
        keep_alive_s=before.keep_alive_s if given.keep_alive_s is None else given.keep_alive_s,
        pinned=before.pinned if given.pinned is None else given.pinned,
        priority=before.priority if given.priority is None else given.priority,
        kv_format=given.kv_format or before.kv_format,
        prefix_cache_nbytes=(
            before.prefix_cache_nbytes
            if given.prefix_cache_nbytes is None
            else given.prefix_cache_nbytes
        ),
    )


def conflict(model: Model, given: LoadSpec) -> InvalidRequest | None:
    """Return why `given` cannot be had from a model that is loaded, or being loaded, already."""
    if not isinstance(model.phase, Joinable):
        return None
    plan = model.phase.plan
    pairs = (
        ("context_length", given.context_length, plan.context_length),
        ("rows_max", given.rows_max, plan.rows_max),
        ("weights", None if given.weights is Weights.AUTO else given.weights.value,
         plan.weights.value),
        ("kv_format", given.kv_format and given.kv_format.value, plan.kv_format.value),
        ("prefix_cache_bytes", given.prefix_cache_nbytes, plan.prefix_bytes),
    )  # fmt: skip
    found = [
        FieldViolation(f"options.{name}", f"loaded with {in_force}; unload the model first")
        for name, asked, in_force in pairs
        if asked is not None and asked != in_force
    ]
    if merge(given.sampling, model.spec.sampling) != model.spec.sampling:
        found.append(
            FieldViolation("options.sampling", "loaded with others; unload the model first")
        )
    return InvalidRequest(tuple(found)) if found else None
