"""A fleet around a controller's life: nodes taken, workers adopted, agents let go at the end.

However the start ends, no agent is left that was taken.

A worker of an earlier controller is adopted if its agent says what it holds, that model is
configured here, and the worker itself reports it ready; one worker a model. All others are ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mlxd_controller.fleet.catalog import FleetStore
from mlxd_controller.fleet.facts import AgentOptions, Kept
from mlxd_controller.fleet.launcher import FleetProcess
from mlxd_controller.fleet.machine import channel_of
from mlxd_controller.fleet.probe import Fleet, Membership
from mlxd_controller.launcher.survivors import AT_ONCE_MAX, find_configured, problem_of
from mlxd_controller.pulling.wanted import what_forbids
from mlxd_controller.runtime.ports import Clock, ModelStore, Ports, Survivor
from mlxd_controller.settings import ServeSettings
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.ops.logs import get_logger

NANOS = 1_000_000_000
_log = get_logger("fleet")


@dataclass(frozen=True, slots=True)
class Gathered:
    """The ports to a fleet, and the workers there that this controller takes over.

    `store` has what its nodes have, besides this machine's models.
    """

    ports: Ports
    survivors: tuple[Survivor, ...]
    store: ModelStore


@asynccontextmanager
async def gather_fleet(
    settings: ServeSettings,
    membership: Membership,
    clock: Clock,
    store: ModelStore,
    *,
    environment: Mapping[str, str] = os.environ,
) -> AsyncIterator[Gathered]:
    """Have workers on the nodes of a fleet around the body; at its end none is left.

    Nodes fetch models from a hub unless this server may not: it has no cache of a hub, or its
    `environment` forbids it.

    Raises:
        InvalidRequest: no node came within FLEET_START_S, or a later controller has them all.
        BadCredentials: a file in the folder for TLS cannot be used.
    """
    assert settings.fleet is not None
    fleet = Fleet(
        membership,
        options_of(settings),
        epoch=int(clock.unix_s() * NANOS),
        security=channel_of(settings.fleet.tls),
    )
    try:
        living = await fleet.muster(start_s=config.FLEET_START_S)
    except BaseException:
        await fleet.release()
        raise
    store = FleetStore(store, fleet.nodes, load_defaults=settings.load_defaults)
    if settings.stores.hub_cache is not None and not what_forbids(environment):
        fleet.launcher.find_known = store.find_known
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
            turn = asyncio.Semaphore(AT_ONCE_MAX)

            async def look(process: FleetProcess, kept: Kept) -> None:
                async with turn:
                    await _look(fleet, process, kept, store, survivors)

            async with asyncio.TaskGroup() as looks:
                for process, kept in living:
                    looks.create_task(look(process, kept))
            yield Gathered(ports, tuple(survivors.values()), store)
        finally:
            # Ended already, unless the start failed. Nodes are followed meanwhile: a silent one
            # is lost, and keeps nobody waiting.
            await asyncio.gather(*map(_end, survivors.values()))
            following.cancel()
            await fleet.release()


def options_of(settings: ServeSettings) -> AgentOptions:
    """Return what a controller's settings mean for the nodes."""
    assert settings.fleet is not None
    findings = settings.stores.findings
    return AgentOptions(
        limits=settings.limits,
        stall_timeout_s=settings.load_stall_timeout_s,
        orphan_grace_s=settings.orphan_grace_s,
        waiting_max=settings.waiting_max,
        tls="" if settings.fleet.tls is None else str(settings.fleet.tls),
        findings="" if findings is None else str(findings),
        stores=settings.stores,
    )


async def _look(
    fleet: Fleet,
    process: FleetProcess,
    kept: Kept,
    store: ModelStore,
    survivors: dict[str, Survivor],
) -> None:
    """Add a worker to `survivors`, or end it."""
    survivor = await _adopt(fleet, process, kept, store)
    if survivor is None:
        await process.close()
    elif survivor.ref.digest in survivors:  # a second worker for a model is of no use
        await _end(survivor)
    else:
        survivors[survivor.ref.digest] = survivor


async def _adopt(
    fleet: Fleet, process: FleetProcess, kept: Kept, store: ModelStore
) -> Survivor | None:
    """Adopt a worker; return None, and log why, if it is not to be adopted."""
    worker, holding, node = kept.worker, kept.holding, process.node
    ref = await find_configured(store, holding)
    if ref is None:
        reason = "its model is not configured"
        _log.warning("unknown worker", node=node.name, pid=worker.pid, reason=reason)
        return None
    link = fleet.launcher.connect(
        address=worker.address, incarnation=worker.incarnation, digest=ref.digest
    )
    try:
        status = await link.status(timeout_s=config.ADOPTION_TIMEOUT_S)
        problem = problem_of(
            status, pid=worker.pid, incarnation=worker.incarnation, digest=holding.digest
        )
    except MlxdError as error:
        problem = str(error)
    except BaseException:
        await link.close()
        raise
    if problem:
        _log.warning("unknown worker", node=node.name, pid=worker.pid, reason=problem)
        await link.close()
        return None
    figures = status.workers[0]
    _log.info("worker adopted", node=node.name, pid=worker.pid, model=ref.name)
    return Survivor(process, link, figures, holding, ref, figures.device)


async def _end(survivor: Survivor) -> None:
    await survivor.link.close()
    await survivor.process.close()
