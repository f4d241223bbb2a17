"""A fleet around a controller's life: nodes taken, workers adopted, agents let go at the end.

A worker of an earlier controller is adopted if its agent says what it holds, that model is
configured here, and the worker itself reports it ready; one worker a model. All others are ended.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mlxd_controller.fleet.facts import AgentOptions, Kept
from mlxd_controller.fleet.launcher import FleetProcess
from mlxd_controller.fleet.machine import channel_of
from mlxd_controller.fleet.probe import Fleet, Membership
from mlxd_controller.launcher.survivors import find_configured
from mlxd_controller.runtime.ports import Clock, ModelStore, Ports, Survivor
from mlxd_controller.settings import ServeSettings
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.ops.findings import FINDINGS_FILE
from mlxd_shared.ops.logs import get_logger

NANOS = 1_000_000_000
_log = get_logger("fleet")


@dataclass(frozen=True, slots=True)
class Gathered:
    """The ports to a fleet, and the workers there that this controller takes over."""

    ports: Ports
    survivors: tuple[Survivor, ...]


@asynccontextmanager
async def gather_fleet(
    settings: ServeSettings,
    membership: Membership,
    clock: Clock,
    store: ModelStore,
    *,
    start_s: float = config.FLEET_START_S,
) -> AsyncIterator[Gathered]:
    """Have workers on the nodes of a fleet around the body; at its end none is left.

    start_s: how long to wait for a first node.

    Raises:
        InvalidRequest: no node came.
        BadCredentials: a file in the folder for TLS cannot be used.
    """
    assert settings.fleet is not None
    fleet = Fleet(
        membership,
        options_of(settings),
        epoch=int(clock.unix_s() * NANOS),
        security=channel_of(settings.fleet.tls),
    )
    living = await fleet.muster(start_s=start_s)
    ports = Ports(
        fleet.launcher,
        fleet.launcher.connect,
        fleet.probe,
        clock,
        local_workers=False,
        oom_kills=fleet.count_oom_kills,
    )
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(fleet.run())
        survivors: dict[str, Survivor] = {}
        try:
            for process, kept in living:
                survivor = await _adopt(fleet, process, kept, store, survivors)
                if survivor is not None:
                    survivors[survivor.ref.digest] = survivor
            yield Gathered(ports, tuple(survivors.values()))
        finally:
            for survivor in survivors.values():  # ended already, unless the start failed
                await survivor.link.close()
                await survivor.process.close()
            following.cancel()
            await fleet.release()


def options_of(settings: ServeSettings) -> AgentOptions:
    """Return what a controller's settings mean for the nodes."""
    assert settings.fleet is not None
    folder = settings.stores.models_dir
    return AgentOptions(
        limits=settings.limits,
        stall_timeout_s=settings.load_stall_timeout_s,
        orphan_grace_s=settings.orphan_grace_s,
        waiting_max=settings.waiting_max,
        tls="" if settings.fleet.tls is None else str(settings.fleet.tls),
        findings="" if folder is None else str(folder / FINDINGS_FILE),
        stores=settings.stores,
    )


async def _adopt(
    fleet: Fleet,
    process: FleetProcess,
    kept: Kept,
    store: ModelStore,
    survivors: Mapping[str, Survivor],
) -> Survivor | None:
    """Adopt a worker; return None, and log why, if it is not to be adopted: it is ended then."""
    worker, holding, node = kept.worker, kept.holding, process.node
    ref = await find_configured(store, holding)
    if ref is None or ref.digest in survivors:
        reason = "its model is not configured" if ref is None else "another has its model"
        _log.warning("unknown worker", node=node.name, pid=worker.pid, reason=reason)
        await process.close()
        return None
    link = fleet.launcher.connect(
        address=worker.address, incarnation=worker.incarnation, digest=ref.digest
    )
    try:
        status = await link.status(timeout_s=config.ADOPTION_TIMEOUT_S)
        (figures,) = status.workers
        problem = ""
        if status.version != importlib.metadata.version("mlxd"):
            problem = f"it is of version {status.version}"
        elif figures.state is not ModelState.READY or figures.model_digest != ref.digest:
            problem = f"its model is {figures.state.value}"
    except (MlxdError, ValueError) as error:
        problem = str(error)
    if problem:
        _log.warning("unknown worker", node=node.name, pid=worker.pid, reason=problem)
        await link.close()
        await process.close()
        return None
    _log.info("worker adopted", node=node.name, pid=worker.pid, model=ref.name)
    return Survivor(process, link, figures, holding, ref, figures.device)
