"""What the configuration fixes for loads of models, by the names that it has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlxd_controller.core.state import NOTHING_FIXED
from mlxd_controller.runtime.ports import ModelRef, ModelStore
from mlxd_models.fit.options import check_options
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.logs import get_logger

_log = get_logger("store")


@dataclass(frozen=True, slots=True)
class LoadDefaults:
    """Options of loads, by a model's name, alias or digest."""

    specs: Mapping[str, LoadSpec] = field(default_factory=dict)

    def find(self, names: Iterable[str]) -> LoadSpec:
        """Return what is fixed for the model of these names; nothing, where none is configured."""
        return next((self.specs[name] for name in names if name in self.specs), NOTHING_FIXED)


async def check_load_defaults(defaults: LoadDefaults, store: ModelStore) -> None:
    """Look every configured model up, which makes its name known to the store.

    One that is not there, or cannot be read, may be there later: the log says so.

    Raises:
        InvalidRequest: a model cannot have what is fixed for it, or two names mean one model.
    """
    seen: dict[str, str] = {}
    for name, spec in defaults.specs.items():
        try:
            ref = await store.resolve(name)
        except MlxdError as error:
            _log.warning("a configured model is not there", model=name, reason=error.describe())
            continue
        if ref.digest in seen:
            problem = f"is the model of {seen[ref.digest]!r} too: configure it under one name"
            raise InvalidRequest.of(f'models."{name}"', problem)
        seen[ref.digest] = name
        _check_possible(name, ref, spec)


def _check_possible(name: str, ref: ModelRef, spec: LoadSpec) -> None:
    try:
        check_options(ref.facts, spec, exact=not ref.facts.caches.foreign)
    except InvalidRequest as error:
        first = error.violations[0]
        raise InvalidRequest.of(f'models."{name}": {first.field}', first.description) from error
