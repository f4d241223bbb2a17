"""grpc.health.v1 of models: `models/<name>` serves while the model is ready."""

from __future__ import annotations

from mlxd_controller.changes import Changes
from mlxd_controller.core.state import Phase
from mlxd_controller.ports import BrokenRef
from mlxd_controller.services.catalog import Catalog
from mlxd_shared.serving import Health


async def follow_health(health: Health, catalog: Catalog, changes: Changes) -> None:
    """Keep the models' health up to date, until cancelled; every known name has one."""
    with changes.subscribe() as news:
        for ref in await catalog.store.listed():
            names = (ref.name,) if isinstance(ref, BrokenRef) else (ref.name, *ref.aliases)
            for name in names:
                await health.set(f"models/{name}", serving=False)
        while True:
            model = await news.next()
            known = catalog.store.known(model.digest)
            if known is None:
                continue
            for name in (known.name, *known.aliases):
                await health.set(f"models/{name}", serving=model.phase is Phase.READY)
