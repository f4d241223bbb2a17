"""Pulls by a real controller from a hub on loopback: over gRPC, over Ollama's API, by `mlxd`."""

from __future__ import annotations

import asyncio
import fcntl
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ollama
import pytest

from mlxd import Client, HubDenied, ModelNotFound, PulledModel, PullPhase
from mlxd_models.files.digest import model_digest
from tests.support import hub_server
from tests.support.cli import mlxd
from tests.support.gateways import Web, serve_web
from tests.support.hub_server import FakeHub, Repository
from tests.support.made_stores import commit_of
from tests.support.tiny_model import write_tiny_model

WEIGHTS = "model.safetensors"
COMMIT = commit_of("1")
PART_NBYTES = 10 << 20
"""Which the library reads and counts before it writes it: of two that are told, one is there."""
HELD_NBYTES = 2 * PART_NBYTES + 100


@dataclass(frozen=True, slots=True)
class Scene:
    """A hub, and how a server is told of it and of a cache that is empty."""

    hub: FakeHub
    cache: Path
    tiny: Path

    @property
    def options(self) -> dict[str, Any]:
        """The environment of the server."""
        return {"HF_ENDPOINT": self.hub.endpoint, "HF_HUB_OFFLINE": "0"}


@pytest.fixture(name="scene")
def make_scene(tmp_path: Path) -> Iterator[Scene]:
    """A hub with a model that can be served, one that is gated, and one whose weights stop."""
    (tmp_path / "cache").mkdir()
    tiny = write_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    large = files | {WEIGHTS: random.Random(1).randbytes(3 * PART_NBYTES)}
    repositories = {
        "o/m": Repository(COMMIT, files, ("main", "v1")),
        "o/gated": Repository(COMMIT, files, refusal=(401, "GatedRepo")),
        "o/large": Repository(COMMIT, large),
    }
    with hub_server.serving(FakeHub(repositories)) as hub:
        yield Scene(hub, tmp_path / "cache", tiny)


def address_of(web: Web) -> str:
    """Return the controller's address."""
    assert web.served is not None
    return web.served.address


async def pull(client: Client, model: str) -> PulledModel:
    """Return what a pull has brought."""
    async with client.pull(model) as steps:
        *_, last = [step async for step in steps]
    assert last.pulled is not None
    return last.pulled


@pytest.mark.asyncio
async def test_a_pulled_model_is_served_and_refusals_have_their_class(scene: Scene) -> None:
    """It answers under its name and its digest at once; `mlxd pull` asks the same server, and
    Ollama's own client streams and waits."""
    async with serve_web("--hub-cache", str(scene.cache), environment=scene.options) as web:
        where = address_of(web)
        async with Client(where) as client:
            done = await pull(client, "o/m")
            assert done.digest == model_digest(scene.tiny)
            assert (await client.model("o/m")).digest == done.digest
            assert (await client.complete("a", model="o/m", max_tokens=2)).token_ids
            with pytest.raises(HubDenied, match="accept its terms"):
                await pull(client, "o/gated")
            with pytest.raises(ModelNotFound, match="o/none"):
                await pull(client, "o/none")

        by_command = await mlxd("pull", "o/m@v1", "--json", MLXD_ADDRESS=where)
        assert by_command.objects[0]["path"] == done.path
        assert by_command.objects[0]["name"] == "o/m@v1"

        own = ollama.AsyncClient(host=web.url)
        steps = [step async for step in await own.pull("o/m", stream=True)]
        assert steps[0].status == "pulling manifest"
        sized = [step for step in steps if step.digest]
        lengths = {len(content) for content in scene.hub.repositories["o/m"].files.values()}
        assert {step.total for step in sized} == {step.completed for step in sized} == lengths
        assert steps[-1].status == "success"
        assert (await own.pull("o/m:latest")).status == "success"
        assert "o/m" in [model.model for model in (await own.list()).models]
        for name, status in (("o/none", 404), ("o/gated", 403)):
            for streams in (True, False):
                with pytest.raises(ollama.ResponseError) as refused:
                    await _pull_all(own, name, streams)
                # A refusal of a stream is a line of it where the download's process came up late.
                assert refused.value.status_code in ({status, -1} if streams else {status})
        await own._client.aclose()


async def _pull_all(client: ollama.AsyncClient, name: str, streams: bool) -> None:
    if not streams:
        await client.pull(name)
        return
    async for _ in await client.pull(name, stream=True):
        pass


@pytest.mark.asyncio
async def test_calls_share_a_download_that_ends_with_the_last(scene: Scene) -> None:
    """Whoever speaks which API; what has arrived is not asked for again by a later call, and none
    of it takes anything from a stream of the server's."""
    scene.hub.hold_at[WEIGHTS] = HELD_NBYTES
    async with (
        serve_web("--hub-cache", str(scene.cache), environment=scene.options) as web,
        Client(address_of(web)) as client,
    ):
        first = client.pull("o/large")
        async for step in first:
            if step.file == WEIGHTS and step.file_done_nbytes == 2 * PART_NBYTES:
                break
        own = ollama.AsyncClient(host=web.url)
        second: Any = await own.pull("o/large", stream=True)  # a generator, untyped as one
        joined = await anext(second)
        assert joined.completed == 2 * PART_NBYTES
        assert len(scene.hub.ranges_of(WEIGHTS)) == 1
        await first.aclose()
        assert (await client.complete("a", model="demo", max_tokens=2)).token_ids
        await second.aclose()
        await own._client.aclose()

        await asyncio.to_thread(lock_unfinished, scene.cache, waits=True)
        scene.hub.hold_at.clear()
        async with client.pull("o/large") as third:
            phases = [step.phase async for step in third]
        assert phases[-1] is PullPhase.DONE
        begun, resumed = scene.hub.begins_of(WEIGHTS)
        assert begun == 0
        assert PART_NBYTES <= resumed <= 2 * PART_NBYTES


@pytest.mark.asyncio
async def test_a_server_that_stops_ends_its_downloads(scene: Scene) -> None:
    """At once: nobody waits for a hub that says nothing more, and the hub is let go."""
    scene.hub.hold_at[WEIGHTS] = HELD_NBYTES
    async with serve_web("--hub-cache", str(scene.cache), environment=scene.options) as web:
        client = Client(address_of(web))
        await client.__aenter__()
        steps = client.pull("o/large")
        async for step in steps:
            if step.file == WEIGHTS:
                break
    await client.aclose()
    lock_unfinished(scene.cache, waits=False)


def lock_unfinished(cache: Path, *, waits: bool) -> None:
    """Lock the one file that is unfinished; fails, or waits, while a process writes it."""
    (unfinished,) = cache.glob("**/*unfinished")
    with unfinished.open("rb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
