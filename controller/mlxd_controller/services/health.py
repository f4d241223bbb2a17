"""grpc.health.v1 of models: `models/<name>` is SERVING while the model is ready.

A name that no longer means its model (forgotten, or a removed alias) loses its health: a forgotten
one at once, any other with the next change of its model.
"""

from __future__ import annotations

import asyncio

from mlxd_controller.core.phases import Ready
from mlxd_controller.core.state import Model
from mlxd_controller.runtime.ports import BrokenRef, ModelRef
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services.catalog import Catalog
from mlxd_shared.config import MODELS_KNOWN_MAX
from mlxd_shared.domain.errors import MachineShort, QueueFull
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.serving.health import Health

_log = get_logger("health")


async def follow_health(health: Health, catalog: Catalog, runtime: Runtime) -> None:
    """Keep the models' health up to date until cancelled; every known name has a health."""
    registry = _Registry(health)
    with catalog.store.telling(registry.forget):
        for ref in await _list_models(catalog):
            if isinstance(ref, BrokenRef):
                await health.set(f"models/{ref.name}", serving=False)
            else:
                await registry.tell(ref.digest, (ref.name, *ref.aliases), serving=False)
        while True:
            try:
                with runtime.changes.subscribe() as news:
                    for model in runtime.state.models.values():
                        await _tell(registry, catalog, model)
                    while True:
                        await _tell(registry, catalog, await news.next())
            except QueueFull as error:
                _log.warning("health of models is rebuilt", reason=error.describe())
                await asyncio.sleep(error.retry_after_s)


class _Registry:
    """The names reported for each model, the model with the oldest report first."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._names: dict[str, tuple[str, ...]] = {}

    async def tell(self, digest: str, names: tuple[str, ...], *, serving: bool) -> None:
        """Report a model's health under all its names, and drop names that it no longer has."""
        former = self._names.pop(digest, ())
        self._names[digest] = names
        if len(self._names) > MODELS_KNOWN_MAX:
            del self._names[next(iter(self._names))]
        for name in former:
            if name not in names and not any(name in known for known in self._names.values()):
                self._health.forget(f"models/{name}")
        for name in names:
            await self._health.set(f"models/{name}", serving=serving)

    def forget(self, name: str) -> None:
        """Drop a name that no longer means a model."""
        for digest, names in self._names.items():
            if name in names:
                self._names[digest] = tuple(known for known in names if known != name)
        self._health.forget(f"models/{name}")


async def _list_models(catalog: Catalog) -> tuple[ModelRef | BrokenRef, ...]:
    """Return every model, retrying while the machine is short of something."""
    while True:
        try:
            return await catalog.store.list_models()
        except MachineShort as error:
            _log.warning("listing models again", reason=error.describe())
            await asyncio.sleep(error.retry_after_s)


async def _tell(registry: _Registry, catalog: Catalog, model: Model) -> None:
    known = catalog.store.find_known(model.digest)
    names = () if known is None else (known.name, *known.aliases)
    await registry.tell(model.digest, names, serving=isinstance(model.phase, Ready))
