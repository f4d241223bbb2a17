"""The composition root: from settings to a running controller, and its graceful stop.

Health is SERVING only while requests are accepted; NOT_SERVING is announced before they are
refused. However serve() ends, no worker process is left, and its files are removed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mlxd_controller.core.events import ShutDown
from mlxd_controller.core.state import State
from mlxd_controller.crew import crew_of, take_held
from mlxd_controller.gateway import Gateway
from mlxd_controller.metrics.exposition import render
from mlxd_controller.metrics.http import PATH as METRICS_PATH
from mlxd_controller.metrics.http import serving_metrics
from mlxd_controller.prefixes.keeper import Keeper
from mlxd_controller.pulling.downloads import Downloads, downloads_into
from mlxd_controller.pulling.process import fetch
from mlxd_controller.router.services import Services
from mlxd_controller.runtime.adoption import enrol
from mlxd_controller.runtime.describing import describe_survivors
from mlxd_controller.runtime.ports import ModelRef, ModelStore, SystemClock
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services import inference, models, status
from mlxd_controller.services.allowances import Allowances
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.health import follow_health
from mlxd_controller.settings import RouterDoor, ServeSettings
from mlxd_controller.store.load_defaults import check_load_defaults
from mlxd_controller.store.shelves import DEMO_NAME, demo_model, library_of
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops import logs
from mlxd_shared.ops.heap import bound_heap, keep_heap_trimmed
from mlxd_shared.ops.signals import STOPPING, handling
from mlxd_shared.ops.tracing import Tracer, tracer_of
from mlxd_shared.security.listeners import ListenerSecurity
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, add_service, announce, listen, make_server

if TYPE_CHECKING:
    from mlxd_controller.router.listening import ModelPorts

FLUSH_GRACE_S = 0.5
"""How long calls without a lease may take to end by themselves once all else has ended."""
_SERVICES = (inference.DESCRIPTOR, models.DESCRIPTOR, status.DESCRIPTOR)
_log = logs.get_logger("controller")

Ready = Callable[[str, str | None], None]


class _Door(Protocol):
    """What takes calls."""

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls at once, and end those under way after `grace` seconds."""


async def serve(settings: ServeSettings, *, on_ready: Ready | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled; then stop gracefully.

    `on_ready` is called once requests are accepted, with the target that clients dial, and the
    gateway's URL if there is one.

    Raises:
        InvalidRequest: an address, a name or a folder in the settings is wrong, or OTEL_* variables
            ask for what is not there.
        BadCredentials: a file of `settings.security` cannot be used.
        ExceptionGroup: a bug.
    """
    bound_heap()
    logs.configure(level=settings.log_level, fmt=settings.log_format)
    stopping = asyncio.Event()
    with handling(lambda _: stopping.set(), *STOPPING), _tracing() as tracer:
        async with _running(settings, tracer) as (target, url):
            _log.info("serving", address=target, url=url)
            if on_ready is not None:
                on_ready(target, url)
            await stopping.wait()
            _log.info("stopping", grace_s=settings.shutdown_grace_s)
    _log.info("stopped")


@contextmanager
def _tracing() -> Iterator[Tracer | None]:
    """Yield what traces calls, where OTEL_* variables ask for it; at the end its rest is sent."""
    tracer = tracer_of("mlxd-controller", os.environ)
    try:
        yield tracer
    finally:
        if tracer is not None:
            tracer.close()


@asynccontextmanager
async def _running(
    settings: ServeSettings, tracer: Tracer | None
) -> AsyncIterator[tuple[str, str | None]]:
    """Run a controller around the body; yields what clients dial, and the gateway's URL."""
    security = settings.security.load()
    clock = SystemClock()
    named = settings.models or ((DEMO_NAME, demo_model()),)
    defaults, launches = settings.load_defaults, not settings.workers
    store = library_of(named, settings.stores, launches=launches, load_defaults=defaults)
    await check_load_defaults(defaults, store)
    async with (
        downloads_into(settings.stores.hub_cache, partial(fetch, environment=os.environ)) as pulls,
        crew_of(settings, clock, store) as crew,
    ):
        held = await take_held(crew, store)
        state = State(
            devices=crew.ports.probe.read([recovered.process.pid for recovered in crew.survivors]),
            keep_alive_s=settings.keep_alive_s,
            max_loaded=crew.max_loaded,
        )
        runtime = Runtime(
            crew.ports,
            state,
            stall_timeout_s=settings.load_stall_timeout_s,
            silent_max_s=settings.silent_max_s,
        )
        survivors = (*crew.survivors, *held)
        await describe_survivors(survivors)
        local, endable = crew.ports.local_workers, crew.ports.endable_workers
        runtime.adopt(enrol(survivors, state, clock, local=local, endable=endable))
        offered = crew.store or store
        preloaded = [await offered.resolve(name) for name in settings.preload]
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(runtime.run())
            try:
                async with _listening(
                    settings,
                    runtime,
                    offered,
                    clock,
                    keeper=crew.keeper,
                    downloads=pulls,
                    tasks=tasks,
                    running=running,
                    security=security,
                    tracer=tracer,
                ) as served:
                    for ref in preloaded:
                        tasks.create_task(_preload(runtime, ref))
                    try:
                        yield served
                    finally:
                        crew.leave()
            except BaseException:  # a failed start must not unload the workers of others
                crew.leave()
                raise


@asynccontextmanager
async def _listening(
    settings: ServeSettings,
    runtime: Runtime,
    store: ModelStore,
    clock: SystemClock,
    *,
    keeper: Keeper | None,
    downloads: Downloads | None,
    tasks: asyncio.TaskGroup,
    running: asyncio.Task[None],
    security: ListenerSecurity,
    tracer: Tracer | None,
) -> AsyncIterator[tuple[str, str | None]]:
    """Serve the gRPC services around the body, and stop them and the runtime gracefully."""
    health = Health()
    # An operator who lets more streams wait gets room for that many more calls.
    calls_max = config.CALLS_MAX + (settings.waiting_max or 0)
    server = make_server(health, _SERVICES, security=security, calls_max=calls_max, tracer=tracer)
    catalog = Catalog(store, runtime)
    allowances = Allowances(clock, runtime.metrics)
    streams = inference.InferenceService(
        catalog, runtime, clock, allowances=allowances, log_content=settings.log_content
    )
    known = models.ModelService(catalog, runtime, clock, keeper=keeper, downloads=downloads)
    figures = status.StatusService(catalog, runtime, clock, allowances=allowances, keeper=keeper)
    for service, servicer in zip(_SERVICES, (streams, known, figures), strict=True):
        add_service(server, service, servicer)
    gateway = None if settings.http is None else Gateway(settings)
    doors: list[_Door] = [server]
    following = tasks.create_task(follow_health(health, catalog, runtime))
    aside: list[asyncio.Task[None]] = [tasks.create_task(keep_heap_trimmed())]
    if keeper is not None:
        sharing = keeper.run(runtime.workers.live, runtime.metrics, runtime.changes)
        aside.append(tasks.create_task(sharing))
    try:
        target = listen(
            server,
            parse_address(settings.address),
            security=security,
            anywhere=settings.allow_remote,
        )
        if gateway is not None:
            listen(server, parse_address(gateway.private_address))
        await server.start()
        await announce(health, _SERVICES)
        async with _metrics(settings, security, figures):
            url = None if gateway is None else await gateway.start()
            if gateway is not None:
                tasks.create_task(gateway.watch())
            if settings.router is not None:
                services = Services(catalog, streams, known, runtime, clock)
                doors.append(ports := _router_ports(settings.router, services, calls_max))
                await ports.start()
                aside.append(tasks.create_task(ports.follow()))
            yield target, url
    finally:
        if gateway is not None:
            gateway.leave()
        following.cancel()
        for task in aside:
            task.cancel()
        await health.leave()
        runtime.post(ShutDown(settings.shutdown_grace_s))
        # Refuses new calls at once; the second stop ends calls without a lease, such as watches.
        stopping = asyncio.create_task(_stop(doors, settings.shutdown_grace_s + FLUSH_GRACE_S))
        await asyncio.wait({running})
        await _stop(doors, FLUSH_GRACE_S)
        await stopping
        if gateway is not None:
            await gateway.close()


def _router_ports(door: RouterDoor, services: Services, calls_max: int) -> ModelPorts:
    """Return the door for a router, which does not listen yet; what it imports is an extra."""
    from mlxd_controller.router.listening import ModelPorts  # noqa: PLC0415

    return ModelPorts(door, services, calls_max=calls_max)


async def _stop(doors: Sequence[_Door], grace_s: float) -> None:
    """Refuse new calls at every door at once, and end those under way after the grace."""
    await asyncio.gather(*(door.stop(grace_s) for door in doors))


@asynccontextmanager
async def _metrics(
    settings: ServeSettings, security: ListenerSecurity, figures: status.StatusService
) -> AsyncIterator[None]:
    """Serve Prometheus around the body, if configured."""
    if settings.metrics is None:
        yield
        return

    async def scrape() -> bytes:
        return render(await figures.read(), vllm_aliases=settings.metrics_vllm_aliases)

    async with serving_metrics(
        settings.metrics, scrape, security=security, anywhere=settings.allow_remote
    ) as address:
        _log.info("serving metrics", address=address, path=METRICS_PATH)
        yield


async def _preload(runtime: Runtime, ref: ModelRef) -> None:
    try:
        async with runtime.loading(ref, LoadSpec()) as answer:
            await answer
    except MlxdError as error:
        _log.error("preload failed", model=ref.name, reason=error.describe())
