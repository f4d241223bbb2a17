"""What loads fixed for a model: how a later load's options meet those in force. Pure."""

from __future__ import annotations

from dataclasses import fields, replace

from mlxd_controller.core.phases import Joinable
from mlxd_controller.core.state import Model
from mlxd_shared.domain.errors import FieldViolation, InvalidRequest
from mlxd_shared.domain.requests import LoadSpec, Weights, merge


def with_configured(model: Model, configured: LoadSpec, *, keep_alive_s: float) -> Model:
    """Return a model for which nothing is fixed but what the configuration fixes.

    keep_alive_s: of models for which it says nothing of that.
    """
    own_s = configured.keep_alive_s
    return replace(
        model,
        spec=configured,
        configured=configured,
        pinned=bool(configured.pinned),
        keep_alive_s=keep_alive_s if own_s is None else own_s,
    )


def fill_in(spec: LoadSpec, before: LoadSpec) -> LoadSpec:
    """Return `spec`, with what it leaves open taken from `before`."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    own = {name: value for name, value in values.items() if value not in (None, Weights.AUTO)}
    return replace(before, **own | {"sampling": merge(spec.sampling, before.sampling)})


def conflict(model: Model, spec: LoadSpec) -> InvalidRequest | None:
    """Return why `spec` cannot be had from a model that is loaded, or being loaded, already."""
    if not isinstance(model.phase, Joinable):
        return None
    plan = model.phase.plan
    pairs = (
        ("context_length", spec.context_length, plan.context_length),
        ("rows_max", spec.rows_max, plan.rows_max),
        ("weights", None if spec.weights is Weights.AUTO else spec.weights.value,
         plan.weights.value),
        ("kv_format", spec.kv_format and spec.kv_format.value, plan.kv_format.value),
        ("prefix_cache_bytes", spec.prefix_cache_nbytes, plan.prefix_bytes),
        ("ranks", spec.ranks, plan.ranks),
    )  # fmt: skip
    violations = [
        FieldViolation(f"options.{name}", f"loaded with {in_force}; unload the model first")
        for name, requested, in_force in pairs
        if requested is not None and requested != in_force
    ]
    if merge(spec.sampling, model.spec.sampling) != model.spec.sampling:
        violations.append(
            FieldViolation("options.sampling", "loaded with others; unload the model first")
        )
    return InvalidRequest(tuple(violations)) if violations else None
