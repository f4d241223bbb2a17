"""A whole controller in this process: real services over real gRPC, fake workers, a still clock."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2_grpc,
    status_pb2_grpc,
)
from mlxd_controller.core import phases
from mlxd_controller.core.events import ShutDown, Tick
from mlxd_controller.core.state import Model, State
from mlxd_controller.runtime.ports import Clock, ModelStore, Ports
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.services import inference, models, status
from mlxd_controller.services.allowances import Allowances
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.health import follow_health
from mlxd_controller.services.inference import InferenceService
from mlxd_controller.services.models import ModelService
from mlxd_controller.services.status import StatusService
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, add_service, listen, make_server
from tests.fakes.store import FakeStore
from tests.fakes.workers import FakeWorkers
from tests.fakes.world import FakeClock, FakeProbe
from tests.support.model_facts import device, facts

ROOMY = device(1 << 14)


@dataclass(slots=True)
class Stack:
    """A controller and everything that a test may turn."""

    runtime: Runtime
    workers: FakeWorkers
    clock: FakeClock
    probe: FakeProbe
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceServiceAsyncStub = field(init=False)
    models: model_pb2_grpc.ModelServiceAsyncStub = field(init=False)
    status: status_pb2_grpc.StatusServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)

    def model(self, name: str) -> Model:
        """Return the scheduler's view of a model."""
        return next(m for m in self.runtime.state.models.values() if m.name == name)

    async def until(self, name: str, phase: type[phases.Phase]) -> Model:
        """Wait until a model is in a phase."""
        with self.runtime.changes.subscribe() as news:
            models = [m for m in self.runtime.state.models.values() if m.name == name]
            while not models or not isinstance(models[0].phase, phase):
                models = [m for m in [await news.next()] if m.name == name]
            return models[0]

    async def settle(self) -> None:
        """Let every event that has been sent be decided on."""
        await self.unload("nobody")

    async def unload(self, digest: str) -> None:
        """Unload by digest; what is not there answers at once."""
        await self.runtime.unload(digest, grace_s=0.0, force=True)

    def pass_time(self, seconds: float) -> None:
        """Move the clock and let the scheduler see it."""
        self.clock.now += seconds
        self.runtime.post(Tick())

    async def generate(
        self, model: str = "a", **fields: object
    ) -> list[inference_pb2.GenerateResponse]:
        """Return a whole stream."""
        return [message async for message in self.inference.Generate(request(model, **fields))]


def request(model: str = "a", **fields: object) -> inference_pb2.GenerateRequest:
    """Return a good request."""
    message = inference_pb2.GenerateRequest(model=model, text="once")
    message.MergeFrom(inference_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
    return message


def store_of(sizes: Mapping[str, int]) -> FakeStore:
    """Return a store of models with these weights in MiB, each with a digest of its own."""
    return FakeStore({name: (f"digest-{name}", facts(mib)) for name, mib in sizes.items()})


@asynccontextmanager
async def controller_stack(
    *,
    store: ModelStore | None = None,
    memory: Device = ROOMY,
    others: tuple[Device, ...] = (),
    max_loaded: int | None = None,
    stall_timeout_s: float = 60.0,
    silent_max_s: float = config.WORKER_SILENT_MAX_S,
    poll_s: float = config.STATUS_POLL_S,
    oom_kills: Callable[[str], int | None] = lambda _: None,
) -> AsyncIterator[Stack]:
    """Run a controller around the body; fails if its runtime did or a process is left."""
    store = store or store_of({"a": 10})
    workers, clock, probe = FakeWorkers(), FakeClock(), FakeProbe(memory, *others)
    state = State(devices=(memory, *others), max_loaded=max_loaded, age_min_s=0.0)
    ports = Ports(workers.launcher, workers.connect, probe, clock, oom_kills=oom_kills)
    runtime = Runtime(
        ports, state, stall_timeout_s=stall_timeout_s, silent_max_s=silent_max_s, poll_s=poll_s
    )
    async with serving(runtime, store, clock) as channel:
        yield Stack(runtime, workers, clock, probe, channel)
    assert workers.living == 0


@asynccontextmanager
async def serving(
    runtime: Runtime, store: ModelStore, clock: Clock
) -> AsyncIterator[grpc.aio.Channel]:
    """Run a controller on `runtime` around the body, which is given a connection to it."""
    catalog = Catalog(store, runtime)
    health = Health()
    server = make_server(health, ())
    allowances = Allowances(clock, runtime.metrics)
    streams = InferenceService(catalog, runtime, clock, allowances=allowances)
    figures = StatusService(catalog, runtime, clock, allowances=allowances)
    add_service(server, inference.DESCRIPTOR, streams)
    add_service(server, models.DESCRIPTOR, ModelService(catalog, runtime, clock))
    add_service(server, status.DESCRIPTOR, figures)
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        target = listen(server, parse_address(f"unix:{Path(folder)}/private/c.sock"))
        await server.start()
        following = asyncio.create_task(follow_health(health, catalog, runtime))
        running = asyncio.create_task(runtime.run())
        try:
            async with grpc.aio.insecure_channel(target) as channel:
                yield channel
        finally:
            runtime.post(ShutDown(0.0))
            await running
            following.cancel()
            await asyncio.wait({following})
            await server.stop(0)
