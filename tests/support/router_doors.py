"""A router's door over a controller in this process, and a stub of one of its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc

from mlxd_controller.router.listening import ModelPorts
from mlxd_controller.router.services import Services
from mlxd_controller.runtime.ports import ModelStore
from mlxd_controller.services.allowances import Allowances
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.inference import InferenceService
from mlxd_controller.services.models import ModelService
from mlxd_controller.settings import RouterDoor
from mlxd_shared import config
from tests.support.controller_stack import Stack
from tests.support.smg import targets_of

HERE = "127.0.0.1:0"


def services_of(stack: Stack, store: ModelStore) -> Services:
    """Return a controller's own services, over its runtime."""
    runtime, clock = stack.runtime, stack.clock
    catalog = Catalog(store, runtime)
    inference = InferenceService(
        catalog, runtime, clock, allowances=Allowances(clock, runtime.metrics)
    )
    return Services(catalog, inference, ModelService(catalog, runtime, clock), runtime, clock)


def ports_of(
    stack: Stack, store: ModelStore, door: RouterDoor, *, calls_max: int = config.CALLS_MAX
) -> ModelPorts:
    """Return the ports of a door, which do not listen yet."""
    return ModelPorts(door, services_of(stack, store), calls_max=calls_max)


@asynccontextmanager
async def engines_of(
    stack: Stack, store: ModelStore, folder: Path, *, calls_max: int = config.CALLS_MAX
) -> AsyncIterator[list[Any]]:
    """Serve every model around the body, which is given a stub of each, by name."""
    manifest = folder / "manifest.json"
    ports = ports_of(stack, store, RouterDoor(HERE, manifest=manifest), calls_max=calls_max)
    await ports.start()
    channels = [grpc.aio.insecure_channel(target) for target in targets_of(manifest)]
    try:
        yield [vllm_engine_pb2_grpc.VllmEngineStub(channel) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()
        await ports.stop(0)
