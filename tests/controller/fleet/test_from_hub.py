"""Nodes that fetch models from a hub by themselves, and have copies where they cannot."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from mlxd_controller.fleet.errors import close_answer
from mlxd_controller.fleet.gathering import gather_fleet
from mlxd_controller.fleet.launcher import FleetLauncher
from mlxd_controller.fleet.node import Node
from mlxd_controller.fleet.sending import STAGE, Sent, send_model
from mlxd_controller.runtime.ports import HubOrigin, ModelRef, SystemClock
from mlxd_controller.settings import FleetPlace, ServeSettings, StorePlaces
from mlxd_controller.store.shelves import library_of
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import (
    MachineShort,
    MlxdError,
    PullInterrupted,
    StoreFull,
)
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
from tests.fakes.nodes import FixedMembership, NodeInside
from tests.support.fleets import FAKE, Blind, Followed, follow, nodes_of
from tests.support.hub_server import FakeHub, Repository, serving
from tests.support.made_stores import commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model

COMMIT = commit_of("1")
WEIGHTS = "model.safetensors"
LARGE = "zeta.json"
PART_NBYTES = 10 << 20
"""Which the library reads and counts before it writes it: of two that are told, one is there."""
PROBLEM = "no files from the hub"
CLOSED = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class Scene:
    """A hub, and what the server has from it."""

    hub: FakeHub
    files: dict[str, bytes]
    ref: ModelRef

    @property
    def origin(self) -> HubOrigin:
        """Where the hub has the model."""
        assert self.ref.origin is not None
        return self.ref.origin

    @property
    def repository(self) -> Repository:
        """What the hub has."""
        return self.hub.repositories["o/m"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has a tiny model."""
    folder = write_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(FakeHub({"o/m": Repository(COMMIT, files)})) as served:
        yield served


@pytest_asyncio.fixture
async def scene(hub: FakeHub, tmp_path: Path) -> Scene:
    """The server has pulled that model."""
    cache = tmp_path / "hub-of-the-server"
    write_hub_model(cache, "o/m", tmp_path / "tiny", commit=COMMIT)
    ref = await library_of((), StorePlaces(hub_cache=cache)).resolve("o/m")
    return Scene(hub, hub.repositories["o/m"].files, ref)


@pytest_asyncio.fixture
async def seen(hub: FakeHub, tmp_path: Path) -> AsyncIterator[Followed]:
    """Node a, which has nothing, and asks the hub with a token of its own."""
    async with nodes_of(FAKE) as nodes:
        nodes.files["a"] = Blind(tmp_path / "copies", hub=tmp_path / "hub-of-a")
        nodes.environments["a"] = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "of-the-node",
        }
        nodes.add("a")
        async with follow(nodes) as followed:
            yield followed


async def send(
    node: Node, ref: ModelRef, origin: HubOrigin | None
) -> tuple[list[LoadProgress], Path]:
    """Return the steps, and where the model is on the node."""
    async with aclosing(send_model(node, ref.digest, ref.path, origin=origin)) as values:
        *steps, sent = [value async for value in values]
    assert isinstance(sent, Sent)
    return [step for step in steps if isinstance(step, LoadProgress)], Path(sent.path)


@pytest.mark.asyncio
async def test_a_node_fetches_a_model_by_itself(
    seen: Followed, scene: Scene, tmp_path: Path
) -> None:
    """With progress, at the server's commit, with its own token; it is the node's from then on."""
    handle = seen.nodes.handles["a"]
    steps, path = await send(seen.node("a"), scene.ref, scene.origin)

    assert path == tmp_path / "hub-of-a" / "models--o--m" / "snapshots" / COMMIT
    assert model_digest(path) == scene.ref.digest
    assert {step.stage for step in steps} == {STAGE}
    assert steps[-1].bytes_read == steps[-1].bytes_total == sum(map(len, scene.files.values()))
    questions = zip(scene.hub.requested, scene.hub.tokens, strict=True)
    shown = {token for (_, where, _), token in questions if "o/m" in where}
    assert shown == {"Bearer of-the-node"}
    assert not {"offer_model", "begin_copy"} & set(handle.calls)
    assert await send(seen.node("a"), scene.ref, scene.origin) == ([], path)
    assert [ref.name for ref in await seen.node("a").list_models()] == [f"o/m@{COMMIT}"]


@pytest.mark.asyncio
async def test_another_content_of_a_commit_is_not_used(
    seen: Followed, scene: Scene, tmp_path: Path
) -> None:
    """A hub that has other weights there is told of; the server's files are copied instead."""
    other = bytes(reversed(scene.files[WEIGHTS]))
    scene.repository.files = {**scene.files, WEIGHTS: other}
    with capture_logs() as log:
        _, path = await send(seen.node("a"), scene.ref, scene.origin)

    assert path == tmp_path / "copies" / scene.ref.digest
    assert model_digest(path) == scene.ref.digest
    (line,) = [entry for entry in log if entry["event"] == PROBLEM]
    assert line["node"] == "a"
    assert f"{WEIGHTS}: the hub has it with the hash" in line["reason"]


REFUSALS: dict[str, Callable[[Scene], None]] = {
    "gated": lambda scene: setattr(scene.repository, "refusal", (401, "GatedRepo")),
    "has none, or not for you": lambda scene: scene.hub.repositories.clear(),
    "no such revision": lambda scene: setattr(scene.repository, "commit", commit_of("2")),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("reason", REFUSALS)
async def test_what_the_hub_refuses_is_copied(
    reason: str, seen: Followed, scene: Scene, tmp_path: Path
) -> None:
    """And the log says why."""
    REFUSALS[reason](scene)
    with capture_logs() as log:
        _, path = await send(seen.node("a"), scene.ref, scene.origin)
    assert path == tmp_path / "copies" / scene.ref.digest
    (line,) = [entry for entry in log if entry["event"] == PROBLEM]
    assert reason in line["reason"]


@pytest.mark.asyncio
async def test_a_hub_out_of_reach_is_asked_once(
    seen: Followed, scene: Scene, tmp_path: Path
) -> None:
    """Every load is served by copies; where nobody has the files both are named."""
    seen.nodes.environments["a"]["HF_ENDPOINT"] = CLOSED
    with capture_logs() as log:
        for _ in range(2):
            _, path = await send(seen.node("a"), scene.ref, scene.origin)
            assert path == tmp_path / "copies" / scene.ref.digest
            shutil.rmtree(path)
    assert len([entry for entry in log if entry["event"] == PROBLEM]) == 1
    away = replace(scene.ref, path=Path("/nowhere"))
    with pytest.raises(PullInterrupted, match=r"of o/m .*, nor has the hub: no answer"):
        await send(seen.node("a"), away, scene.origin)


@pytest.mark.asyncio
async def test_a_load_that_is_given_up_ends_the_download_and_the_next_goes_on(
    seen: Followed, scene: Scene
) -> None:
    """What has arrived is not asked for again."""
    large = random.Random(1).randbytes(3 * PART_NBYTES)
    scene.repository.files = {**scene.files, LARGE: large}
    scene.hub.hold_at[LARGE] = 2 * PART_NBYTES + 100
    node = seen.node("a")
    sending = send_model(node, scene.ref.digest, scene.ref.path, origin=scene.origin)
    async with aclosing(sending) as values:
        async for value in values:
            if isinstance(value, LoadProgress) and value.bytes_read > 2 * PART_NBYTES:
                break
    assert "leave_pull" in seen.nodes.handles["a"].calls

    scene.hub.hold_at.clear()
    _, path = await send(node, scene.ref, scene.origin)
    first, second = scene.hub.begins_of(LARGE)
    assert first == 0
    assert PART_NBYTES <= second <= 2 * PART_NBYTES
    assert (path / LARGE).read_bytes() == large


class Answering(NodeInside):
    """The way to a node whose downloads go as a test says: a step or an error each."""

    answers: list[PullProgress | MlxdError]

    async def call(self, method: str, epoch: int, *args: object) -> Any:
        """Answer in order."""
        if method != "pull_model":
            return await super().call(method, epoch, *args)
        self.calls.append(method)
        answer = self.answers.pop(0)
        return close_answer(answer) if isinstance(answer, MlxdError) else answer


@pytest_asyncio.fixture
async def way(tmp_path: Path) -> AsyncIterator[tuple[Answering, Node]]:
    """Such a node."""
    async with nodes_of(FAKE) as nodes:
        nodes.files["a"] = Blind(tmp_path / "copies")
        nodes.handles["a"] = answering = Answering(nodes.add("a").agent)
        async with follow(nodes) as followed:
            yield answering, followed.node("a")


def step(done_nbytes: int) -> PullProgress:
    """Return a step with so much."""
    return PullProgress(PullPhase.DOWNLOADING, done_nbytes=done_nbytes, total_nbytes=9)


CUT = PullInterrupted("cut")
DONE = replace(
    step(9),
    phase=PullPhase.DONE,
    pulled=PulledModel("o/m", "o/m", COMMIT, COMMIT, "/there", "", 1, 9),
)


@pytest.mark.asyncio
async def test_what_is_cut_off_goes_on_as_long_as_more_arrives(
    way: tuple[Answering, Node], scene: Scene
) -> None:
    """Progress never goes back; two cuts without a byte between them end it, and it is copied."""
    handle, node = way
    handle.answers = [step(2), CUT, step(0), step(2), step(3), CUT, step(5), CUT, DONE]
    steps, path = await send(node, scene.ref, scene.origin)
    assert [each.bytes_read for each in steps] == [0, 2, 3, 5, 9]
    assert path == Path("/there")
    handle.answers = [step(2), CUT, step(2), CUT]
    _, path = await send(node, scene.ref, scene.origin)
    assert path.parent.name == "copies"


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [StoreFull("full"), MachineShort("memory", "a download")])
async def test_what_the_node_lacks_is_not_tried_in_another_way(
    error: MlxdError, way: tuple[Answering, Node], scene: Scene
) -> None:
    """A copy would take its disk's reserve, or the same memory."""
    handle, node = way
    handle.answers = [error]
    with pytest.raises(type(error)):
        await send(node, scene.ref, scene.origin)
    assert "begin_copy" not in handle.calls


@pytest.mark.asyncio
async def test_a_reason_is_told_again_once_it_has_changed(
    way: tuple[Answering, Node], scene: Scene, tmp_path: Path
) -> None:
    """Or after the hub has given something."""
    handle, node = way
    first, second = PullInterrupted("one"), PullInterrupted("two")
    handle.answers = [first, first, second, second, second, second, DONE, second, second]
    with capture_logs() as log:
        for _ in range(5):
            _, path = await send(node, scene.ref, scene.origin)
            if path.is_relative_to(tmp_path):
                shutil.rmtree(path)
    assert [entry["reason"] for entry in log if entry["event"] == PROBLEM] == ["one", "two", "two"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("variables", "has_cache", "asks"),
    [({}, True, True), ({"HF_HUB_OFFLINE": "1"}, True, False), ({}, False, False)],
)
async def test_nodes_ask_a_hub_where_their_server_may(
    variables: dict[str, str], has_cache: bool, asks: bool, scene: Scene, tmp_path: Path
) -> None:
    """A server without a hub's cache, or that is to stay offline, has no node reach out."""
    cache = scene.ref.path.parents[2]
    settings = ServeSettings(
        fleet=FleetPlace("auto"), stores=StorePlaces(hub_cache=cache if has_cache else None)
    )
    own = library_of((), StorePlaces(hub_cache=cache))
    await own.resolve("o/m")
    async with nodes_of(FAKE, "a") as nodes:
        membership = FixedMembership(nodes.handles)
        clock = SystemClock()
        async with gather_fleet(
            settings, membership, clock, own, environment=variables
        ) as gathered:
            launcher = gathered.ports.launcher
            assert isinstance(launcher, FleetLauncher)
            known = launcher.find_known(scene.ref.digest)
            assert (known is not None and known.origin == scene.origin) is asks
