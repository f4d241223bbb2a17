"""Which models have a port, at which one, and what the file for routers says."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from mlxd_controller.router.listening import ModelPorts
from mlxd_controller.settings import RouterDoor
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound
from tests.fakes.store import FakeStore
from tests.support.controller_stack import Stack, controller_stack
from tests.support.model_facts import facts
from tests.support.ports import own_port
from tests.support.router_doors import HERE, ports_of
from tests.support.smg import targets_of


def store_with(*names: str) -> FakeStore:
    """Return a store of models of these names."""
    return FakeStore({name: (f"digest-{name}", facts(10)) for name in names})


def door(folder: Path, **fields: Any) -> RouterDoor:
    """Return a door with a file, at ports that the system chooses."""
    return RouterDoor(HERE, manifest=folder / "m.json", **fields)


async def health_at(targets: list[str]) -> list[str]:
    """Return what an engine at each target says of its health."""
    said = []
    for target in targets:
        async with grpc.aio.insecure_channel(target) as channel:
            engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            answer = await engine.HealthCheck(pb.HealthCheckRequest())
            said.append(answer.message)
    return said


async def start(stack: Stack, store: FakeStore, wanted: RouterDoor) -> ModelPorts:
    """Return ports that listen."""
    ports = ports_of(stack, store, wanted)
    await ports.start()
    return ports


@pytest.mark.asyncio
async def test_every_model_has_a_port_and_a_line(tmp_path: Path) -> None:
    """But those that cannot be served; the file is as SMG reads it."""
    store = store_with("b", "a")
    store.put(Path("/models/x"), "digest-x", InvalidModel("broken"))
    async with controller_stack(store=store) as stack:
        ports = await start(stack, store, door(tmp_path))
        manifest = json.loads((tmp_path / "m.json").read_text(encoding="utf-8"))
        answers = await health_at(targets_of(tmp_path / "m.json"))
        await ports.stop(0)

        assert manifest["version"] == 1
        assert [set(worker) for worker in manifest["workers"]] == [{"url"}, {"url"}]
        assert answers == ["ok", "ok"]


@pytest.mark.asyncio
async def test_named_models_have_the_next_ports_in_that_order() -> None:
    """From the address's own on, each once; without a file nothing is written."""
    store = store_with("a", "b", "c")
    with own_port() as address:
        async with controller_stack(store=store) as stack:
            ports = await start(stack, store, RouterDoor(address, models=("c", "c")))
            assert await health_at([address]) == ["ok"]
            await ports.stop(0)


@pytest.mark.asyncio
async def test_a_named_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """At the start, and nothing listens."""
    store = store_with("a")
    async with controller_stack(store=store) as stack:
        with pytest.raises(ModelNotFound):
            await ports_of(stack, store, door(tmp_path, models=("a", "z"))).start()
        assert not (tmp_path / "m.json").exists()


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_refused_and_others_are_given_back() -> None:
    """The second model's: the first one's port is free again."""
    store = store_with("a")
    with own_port() as address:
        async with controller_stack(store=store) as stack:
            first = await start(stack, store, RouterDoor(address))
            with pytest.raises(InvalidRequest, match="cannot listen"):
                await ports_of(stack, store, RouterDoor(address)).start()
            await first.stop(0)
            again = await start(stack, store, RouterDoor(address))
            await again.stop(0)


@pytest.mark.asyncio
async def test_a_model_whose_port_is_taken_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    """The later one has its own port at once; the taken one is tried again at the next look."""
    store = store_with("a")
    with own_port() as address, contextlib.ExitStack() as others:
        host, _, first = address.rpartition(":")
        async with controller_stack(store=store) as stack:
            manifest = tmp_path / "m.json"
            ports = await start(stack, store, RouterDoor(address, manifest=manifest))
            taken = others.enter_context(socket.socket())
            taken.bind((host, int(first) + 1))
            taken.listen()
            for name in ("b", "c"):
                store.put(Path(f"/models/{name}"), f"digest-{name}", facts(10))
                await store.add(Path(f"/models/{name}"), name=name)
            with pytest.raises(InvalidRequest, match="cannot listen"):
                await ports.look()
            beside = targets_of(manifest)
            taken.close()
            await ports.look()
            all_three = targets_of(manifest)
            await ports.stop(0)

        assert beside == [address, f"{host}:{int(first) + 2}"]
        assert all_three == [f"{host}:{int(first) + place}" for place in range(3)]


@pytest.mark.asyncio
async def test_the_file_goes_when_the_ports_do(tmp_path: Path) -> None:
    """No router is sent to ports where nobody listens; a successor's file is left alone."""
    store, manifest = store_with("a"), tmp_path / "m.json"
    async with controller_stack(store=store) as stack:
        ports = await start(stack, store, door(tmp_path))
        assert manifest.exists()
        await ports.stop(0)
        assert not manifest.exists()

        ports = await start(stack, store, door(tmp_path))
        manifest.write_text('{"version": 1, "workers": []}', encoding="utf-8")
        await ports.stop(0)
        assert manifest.exists()


@pytest.mark.asyncio
async def test_a_port_beyond_the_last_is_refused() -> None:
    """By the model that would have it."""
    store = store_with("a", "b")
    async with controller_stack(store=store) as stack:
        ports = ports_of(stack, store, RouterDoor("127.0.0.1:65535"))
        with pytest.raises(InvalidRequest, match="65536 for b"):
            await ports.start()


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """At the start, by its name."""
    store = store_with("a")
    async with controller_stack(store=store) as stack:
        ports = ports_of(stack, store, RouterDoor(HERE, manifest=tmp_path / "no" / "m.json"))
        with pytest.raises(InvalidRequest, match="router_manifest"):
            await ports.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]", "[::0]"])
@pytest.mark.asyncio
async def test_a_file_needs_an_address_that_can_be_called(tmp_path: Path, host: str) -> None:
    """An address of all interfaces is none to call at."""
    store = store_with("a")
    wanted = RouterDoor(f"{host}:0", networks=("10.0.0.0/8",), manifest=tmp_path / "m.json")
    async with controller_stack(store=store) as stack:
        with pytest.raises(InvalidRequest, match="router_manifest"):
            ports_of(stack, store, wanted)


@pytest.mark.asyncio
async def test_models_that_come_are_advertised_and_those_that_go_are_not(tmp_path: Path) -> None:
    """A model keeps its port while it is away."""
    store = store_with("a")
    async with controller_stack(store=store) as stack:
        ports = await start(stack, store, door(tmp_path))
        (first,) = targets_of(tmp_path / "m.json")
        store.put(Path("/models/b"), "digest-b", facts(10))
        await store.add(Path("/models/b"), name="b")
        await ports.look()
        both = targets_of(tmp_path / "m.json")
        store.put(Path("/models/b"), "digest-b", InvalidModel("broken"))
        await ports.look()
        left = targets_of(tmp_path / "m.json")
        store.put(Path("/models/b"), "digest-b", facts(10))
        await ports.look()
        again = targets_of(tmp_path / "m.json")
        await ports.stop(0)

        assert both[0] == first
        assert len(both) == 2
        assert left == [first]
        assert again == both


@pytest.mark.asyncio
async def test_models_beyond_the_bound_have_no_port(tmp_path: Path) -> None:
    """The first ones by name have one; the file names no other."""
    names = [f"m{number:03}" for number in range(config.ROUTER_MODELS_MAX + 1)]
    store = store_with(*names)
    async with controller_stack(store=store) as stack:
        ports = await start(stack, store, door(tmp_path))
        assert len(targets_of(tmp_path / "m.json")) == config.ROUTER_MODELS_MAX
        await ports.stop(0)
