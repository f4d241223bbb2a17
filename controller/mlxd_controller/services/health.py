"""grpc.health.v1 of models: `models/<name>` serves while the model is ready.

Invariants:
- What was decided before the first news is told too: a worker that was adopted is ready by then.
- News that were lost, because too much happened at once, end nothing: all is told anew.
"""

from __future__ import annotations

import asyncio

from mlxd_controller.core.state import Model, Phase
from mlxd_controller.ports import BrokenRef, ModelRef
from mlxd_controller.runtime import Runtime
from mlxd_controller.services.catalog import Catalog
from mlxd_shared.errors import MachineShort, QueueFull
from mlxd_shared.logs import get_logger
from mlxd_shared.serving import Health

_log = get_logger("health")


async def follow_health(health: Health, catalog: Catalog, runtime: Runtime) -> None:
    """Keep the models' health up to date, until cancelled; every known name has one."""
    for ref in await _listed(catalog):
        names = (ref.name,) if isinstance(ref, BrokenRef) else (ref.name, *ref.aliases)
        for name in names:
            await health.set(f"models/{name}", serving=False)
    while True:
        try:
            await _follow(health, catalog, runtime)
        except QueueFull as error:
            _log.warning("health of models is told anew", reason=error.describe())
            await asyncio.sleep(error.retry_after_s)


async def _listed(catalog: Catalog) -> tuple[ModelRef | BrokenRef, ...]:
    """Return every model, once the machine can look."""
    while True:
        try:
            return await catalog.store.listed()
        except MachineShort as error:
            _log.warning("models are looked for again", reason=error.describe())
            await asyncio.sleep(error.retry_after_s)


async def _follow(health: Health, catalog: Catalog, runtime: Runtime) -> None:
    """Tell how every model is, and then each change.

    Raises:
        QueueFull: changes were lost.
    """
    with runtime.changes.subscribe() as news:
        for model in runtime.state.models.values():
            await _tell(health, catalog, model)
        while True:
            await _tell(health, catalog, await news.next())


async def _tell(health: Health, catalog: Catalog, model: Model) -> None:
    known = catalog.store.known(model.digest)
    if known is None:
        return
    for name in (known.name, *known.aliases):
        await health.set(f"models/{name}", serving=model.phase is Phase.READY)
