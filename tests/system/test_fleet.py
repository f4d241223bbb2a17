"""A whole controller over nodes of a fleet, with real workers: what its clients see of losses.

The nodes are agents in this process; tests/system/test_ray.py has them on a Ray cluster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from mlxd.v1 import (
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)
from mlxd_controller.core.state import State
from mlxd_controller.fleet.agent import NodeAgent
from mlxd_controller.fleet.facts import AgentOptions
from mlxd_controller.fleet.gathering import gather_fleet
from mlxd_controller.fleet.machine import OwnMachine
from mlxd_controller.fleet.sending import STAGE
from mlxd_controller.runtime.adoption import enrol
from mlxd_controller.runtime.ports import DeviceProbe, SystemClock
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.settings import FleetPlace, Limits, ServeSettings, StorePlaces
from mlxd_controller.store.shelves import library_of
from mlxd_shared.domain.errors import NoRoom
from mlxd_shared.wire.records import duration_to_pb
from mlxd_shared.wire.status import from_call
from tests.fakes.nodes import FixedMembership, NodeInside
from tests.support import hub_server
from tests.support.calls import greedy
from tests.support.controller_stack import serving
from tests.support.fleets import LIMIT_S, REAL, Blind, Nodes, nodes_of
from tests.support.hub_server import FakeHub, Repository
from tests.support.made_stores import commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model

TOKENS = 300
BEFORE_LOSS = 40
WATCH = status_pb2.WatchStatusRequest(interval=duration_to_pb(0.1))


@dataclass(slots=True)
class Served:
    """A controller over a fleet, and how to call it."""

    runtime: Runtime
    inference: inference_pb2_grpc.InferenceServiceAsyncStub
    models: model_pb2_grpc.ModelServiceAsyncStub
    status: status_pb2_grpc.StatusServiceAsyncStub
    adopted: int

    async def workers(self) -> list[status_pb2.WorkerStatus]:
        """Return those that live."""
        answer = await self.status.GetStatus(status_pb2.GetStatusRequest())
        return [each for each in answer.status.workers if not each.HasField("exit_code")]


class Full(OwnMachine):
    """A machine without room for any model."""

    def probe(self, options: AgentOptions) -> DeviceProbe:
        """Return a probe of next to no memory."""
        return super().probe(replace(options, limits=Limits(memory_limit_bytes=1)))


@asynccontextmanager
async def controller(
    nodes: Nodes, *folders: Path, hub: Path | None = None
) -> AsyncIterator[Served]:
    """Serve the models of these folders, and what the nodes have, on the nodes around the body.

    hub: the server's cache of a hub; None: it has none.
    """
    settings = ServeSettings(
        fleet=FleetPlace("auto"),
        limits=Limits(reserve_bytes=0),
        stores=StorePlaces(hub_cache=hub),
        orphan_grace_s=60.0,
    )
    own = library_of(((folder.name, folder) for folder in folders), StorePlaces())
    clock = SystemClock()
    membership = FixedMembership(nodes.handles)
    async with gather_fleet(settings, membership, clock, own, environment={}) as fleet:
        state = State(devices=fleet.ports.probe.read(()))
        runtime = Runtime(fleet.ports, state, stall_timeout_s=LIMIT_S)
        runtime.adopt(enrol(fleet.survivors, state, clock, local=False))
        async with serving(runtime, fleet.store, clock) as channel:
            yield Served(
                runtime,
                inference_pb2_grpc.InferenceServiceStub(channel),
                model_pb2_grpc.ModelServiceStub(channel),
                status_pb2_grpc.StatusServiceStub(channel),
                len(fleet.survivors),
            )


async def ids_of(
    served: Served, *, tokens: int = TOKENS, lose: Nodes | None = None
) -> tuple[list[int], types_pb2.Usage]:
    """Return a greedy stream's ids; of `lose` the node that computes them is cut in the middle."""
    ids: list[int] = []
    request = greedy(model="tiny", max_tokens=tokens)
    async for message in served.inference.Generate(request):
        ids += message.token_ids
        if lose is not None and len(ids) >= BEFORE_LOSS:
            (worker,) = await served.workers()
            (device,) = worker.memory.devices
            lose.handles[device.device.partition("/")[0]].cut()
            lose = None
    return ids, message.usage


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path / "tiny", context_max=4096)


@pytest.mark.asyncio
async def test_a_stream_goes_on_elsewhere_when_its_node_is_lost(model: Path) -> None:
    """Equal tokens, one migration; the status names the machine that is lost."""
    async with nodes_of(REAL, "a", "b") as nodes, controller(nodes, model) as served:
        undisturbed, _ = await ids_of(served)
        ids, usage = await asyncio.wait_for(ids_of(served, lose=nodes), LIMIT_S)

        assert ids == undisturbed
        assert usage.migrations == 1
        answer = await served.status.GetStatus(status_pb2.GetStatusRequest())
        lost = {d.machine for d in answer.status.devices if d.lost}
        assert lost == {m.machine for m in answer.status.machines if m.lost}
        assert len(lost) == 1
        for name in lost:
            nodes.handles[name].mend()


@pytest.mark.asyncio
async def test_without_any_node_a_request_is_told_when_to_come_back(model: Path) -> None:
    """All are lost: no room, with a time; no request waits for ever."""
    async with nodes_of(REAL, "a") as nodes, controller(nodes, model) as served:
        nodes.handles["a"].cut()
        async for message in served.status.WatchStatus(WATCH):
            if all(device.lost for device in message.status.devices):
                break
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(ids_of(served, tokens=4), LIMIT_S)
        error = from_call(caught.value)
        assert isinstance(error, NoRoom)
        assert error.retry_after_s > 0
        nodes.handles["a"].mend()


@pytest.mark.asyncio
async def test_files_that_a_node_lacks_arrive_as_a_part_of_the_load(
    model: Path, tmp_path: Path
) -> None:
    """The copy lies under the model's digest, and a worker that was given it serves."""
    async with nodes_of(REAL) as nodes:
        nodes.files["a"] = Blind(tmp_path / "copies")
        nodes.add("a")
        async with controller(nodes, model) as served:
            ids, _ = await ids_of(served, tokens=8)
            (worker,) = await served.workers()
            assert list((tmp_path / "copies").iterdir()) == [
                tmp_path / "copies" / worker.model_digest
            ]
            assert len(ids) == 8


@pytest.mark.asyncio
async def test_a_model_that_one_node_has_is_loaded_on_another(tmp_path: Path) -> None:
    """It is listed and copied, with progress as a part of the load, and the server never has it."""
    write_tiny_model(tmp_path / "own" / "tiny", context_max=4096)
    async with nodes_of(REAL) as nodes:
        owner = Blind(tmp_path / "copies-a", tmp_path / "own")
        full = NodeAgent("a", "127.0.0.1", machine=Full("a", "127.0.0.1"), files=owner)
        nodes.handles["a"] = NodeInside(full)
        nodes.files["b"] = Blind(tmp_path / "copies-b")
        nodes.add("b")
        async with controller(nodes) as served:
            request = model_pb2.LoadModelRequest(model="tiny")
            loads = [answer.model async for answer in served.models.LoadModel(request)]
            assert STAGE in {load.progress.stage for load in loads}
            assert (loads[-1].device, loads[-1].state) == ("b/cpu", types_pb2.MODEL_STATE_READY)
            ids, _ = await ids_of(served, tokens=8)
            assert len(ids) == 8
        copies = list((tmp_path / "copies-b").iterdir())
        assert copies == [tmp_path / "copies-b" / loads[-1].digest]


@pytest.mark.asyncio
async def test_a_model_of_a_hub_is_fetched_by_the_node_that_loads_it(tmp_path: Path) -> None:
    """As a part of the load; the server never has it, and neither reads nor copies a byte."""
    folder, commit = write_tiny_model(tmp_path / "tiny", context_max=4096), commit_of("1")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_hub_model(tmp_path / "hub-a", "o/m", folder, commit=commit)
    with hub_server.serving(FakeHub({"o/m": Repository(commit, files)})) as hub:
        async with nodes_of(REAL) as nodes:
            owner = Blind(tmp_path / "copies-a", hub=tmp_path / "hub-a")
            full = NodeAgent("a", "127.0.0.1", machine=Full("a", "127.0.0.1"), files=owner)
            nodes.handles["a"] = NodeInside(full)
            nodes.files["b"] = Blind(tmp_path / "copies-b", hub=tmp_path / "hub-b")
            where = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
            nodes.environments["b"] = {**os.environ, **where}
            nodes.add("b")
            async with controller(nodes, hub=tmp_path / "hub") as served:
                request = model_pb2.LoadModelRequest(model="o/m")
                loads = [answer.model async for answer in served.models.LoadModel(request)]
                assert STAGE in {load.progress.stage for load in loads}
                assert loads[-1].state == types_pb2.MODEL_STATE_READY
                assert loads[-1].device == "b/cpu"
                called = {*nodes.handles["a"].calls, *nodes.handles["b"].calls}
                assert not {"begin_copy", "read_part"} & called
        assert (tmp_path / "hub-b" / "models--o--m" / "snapshots" / commit).is_dir()


@pytest.mark.asyncio
async def test_the_next_controller_adopts_what_is_ready(model: Path) -> None:
    """The former one was killed: its worker serves on, the weights are read once."""
    async with nodes_of(REAL, "a") as nodes:
        former = controller(nodes, model)
        first = await former.__aenter__()
        before, _ = await ids_of(first, tokens=8)
        (worker,) = await first.workers()
        await nodes.handles["a"].until(lambda: "remember" in nodes.handles["a"].calls)

        async with controller(nodes, model) as served:
            assert served.adopted == 1
            (adopted,) = await served.workers()
            assert (adopted.pid, adopted.incarnation) == (worker.pid, worker.incarnation)
            after, _ = await ids_of(served, tokens=8)
            assert after == before
        await former.__aexit__(None, None, None)
