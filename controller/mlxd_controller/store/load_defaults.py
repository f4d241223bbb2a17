"""The options that the configuration fixes for loads, by the names it uses for models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxd_controller.core.state import NOTHING_FIXED
from mlxd_controller.runtime.describing import describe_for
from mlxd_controller.runtime.ports import ModelRef, ModelStore
from mlxd_models.fit.options import check_options
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.logs import get_logger

_log = get_logger("store")


LoadDefaults = Mapping[str, LoadSpec]
"""Load options by a model's name, alias or digest."""


def find_defaults(defaults: LoadDefaults, names: Iterable[str]) -> LoadSpec:
    """Return the options fixed for a model with these names; the default if there are none."""
    return next((defaults[name] for name in names if name in defaults), NOTHING_FIXED)


async def check_load_defaults(defaults: LoadDefaults, store: ModelStore) -> None:
    """Look up every configured model, which makes its name known to the store.

    A model that is missing or unreadable may appear later: it is only logged.

    Raises:
        InvalidRequest: a model cannot have its fixed options, or two names mean one model.
    """
    seen: dict[str, str] = {}
    for name, spec in defaults.items():
        try:
            ref = await store.resolve(name)
        except MlxdError as error:
            _log.warning("a configured model is missing", model=name, reason=error.describe())
            continue
        if ref.digest in seen:
            problem = f"is the model of {seen[ref.digest]!r} too: configure it under one name"
            raise InvalidRequest.of(f'models."{name}"', problem)
        seen[ref.digest] = name
        await describe_for(ref.facts, spec)
        _check_possible(name, ref, spec)


def _check_possible(name: str, ref: ModelRef, spec: LoadSpec) -> None:
    try:
        check_options(ref.facts, spec, exact=not ref.facts.caches.foreign)
    except InvalidRequest as error:
        first = error.violations[0]
        raise InvalidRequest.of(f'models."{name}": {first.field}', first.description) from error
