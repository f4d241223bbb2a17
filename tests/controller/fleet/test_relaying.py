"""A model that one node has is copied to another: proved file by file, and resumed at its byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd_controller.fleet.node import Node
from mlxd_controller.fleet.offers import Offers, offer_of
from mlxd_controller.fleet.sending import STAGE, Sent, send_model
from mlxd_models.files.digest import model_digest
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, MlxdError, PullInterrupted
from mlxd_shared.domain.figures import LoadProgress
from tests.fakes.nodes import NodeInside
from tests.support.fleets import FAKE, Blind, Followed, Nodes, follow, nodes_of
from tests.support.tiny_model import write_tiny_model

LARGE = "zeta.json"
LARGE_NBYTES = 3 * config.FLEET_CHUNK_BYTES + 5
NOWHERE = Path("/nowhere/tiny")


class Garbling(NodeInside):
    """The way to a node on which each part of a file is damaged."""

    async def call(self, method: str, epoch: int, *args: object) -> Any:
        """Turn the first bit of what was read."""
        answer = await super().call(method, epoch, *args)
        return bytes([answer[0] ^ 1]) + answer[1:] if method == "read_part" and answer else answer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in the stores of nodes a and c, with a file of several parts."""
    folder = write_tiny_model(tmp_path / "own" / "tiny")
    (folder / LARGE).write_bytes(b"7" * LARGE_NBYTES)
    return folder


@pytest_asyncio.fixture
async def seen(model: Path, tmp_path: Path) -> AsyncIterator[Followed]:
    """Nodes a and c, which have the model, and b, which has none."""
    async with nodes_of(FAKE) as nodes:
        add(nodes, "a", tmp_path, own=model.parent)
        add(nodes, "b", tmp_path)
        add(nodes, "c", tmp_path, own=model.parent)
        async with follow(nodes) as followed:
            yield followed


def add(nodes: Nodes, name: str, folder: Path, *, own: Path | None = None) -> NodeInside:
    """Add a node that sees only what is its own."""
    nodes.files[name] = Blind(folder / f"copies-{name}", own)
    return nodes.add(name)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def send(
    node: Node, digest: str, sources: Sequence[Node], *, cut: NodeInside | None = None
) -> tuple[list[LoadProgress], Sent | MlxdError]:
    """Return the steps and the end of a copy; `cut` is cut in the middle of the large file."""
    steps: list[LoadProgress] = []
    try:
        async with aclosing(send_model(node, digest, NOWHERE, sources)) as values:
            async for value in values:
                if isinstance(value, Sent):
                    return steps, value
                steps.append(value)
                if cut is not None and 0 < value.bytes_total - value.bytes_read < LARGE_NBYTES:
                    cut.cut()
                    cut = None
    except MlxdError as error:
        return steps, error
    raise AssertionError("the copy had no end")


@pytest.mark.asyncio
async def test_what_one_node_has_is_copied_to_another(seen: Followed, model: Path) -> None:
    """With progress, under its digest, byte for byte."""
    digest = model_digest(model)
    steps, sent = await send(seen.node("b"), digest, [seen.node("a")])

    assert isinstance(sent, Sent)
    copy = Path(sent.path)
    assert model_digest(copy) == digest
    assert contents(copy) == contents(model)
    assert {step.stage for step in steps} == {STAGE}
    read = [step.bytes_read for step in steps]
    assert read == sorted(read)
    assert (read[0], read[-1]) == (0, steps[-1].bytes_total)
    assert "read_part" not in seen.nodes.handles["c"].calls


@pytest.mark.asyncio
async def test_a_copy_whose_source_is_lost_goes_on_from_the_same_byte(
    seen: Followed, model: Path
) -> None:
    """When that source is back: what has arrived is not read again."""
    digest, way = model_digest(model), seen.nodes.handles["a"]
    steps, end = await send(seen.node("b"), digest, [seen.node("a")], cut=way)
    assert isinstance(end, PullInterrupted)
    assert "copied from another node" in str(end)
    assert not seen.node("b").lost
    arrived = steps[-1].bytes_read

    way.mend()
    await way.until(lambda: not seen.node("a").lost)
    way.calls.clear()
    steps, end = await send(seen.node("b"), digest, [seen.node("a")])
    assert isinstance(end, Sent)
    assert steps[0].bytes_read == arrived
    assert model_digest(Path(end.path)) == digest


@pytest.mark.asyncio
async def test_another_source_goes_on_where_the_first_one_was_lost(
    seen: Followed, model: Path
) -> None:
    """Within one load, whose progress never goes back."""
    sources = [seen.node("a"), seen.node("c")]
    steps, end = await send(
        seen.node("b"), model_digest(model), sources, cut=seen.nodes.handles["a"]
    )
    assert isinstance(end, Sent)
    read = [step.bytes_read for step in steps]
    assert read == sorted(read)
    assert (Path(end.path) / LARGE).read_bytes() == (model / LARGE).read_bytes()
    seen.nodes.handles["a"].mend()


@pytest.mark.asyncio
async def test_a_file_that_changes_on_its_way_is_refused_by_name(
    model: Path, tmp_path: Path
) -> None:
    """By its SHA-256: the model takes no place."""
    async with nodes_of(FAKE) as nodes:
        nodes.handles["a"] = Garbling(add(nodes, "a", tmp_path, own=model.parent).agent)
        add(nodes, "b", tmp_path)
        async with follow(nodes) as followed:
            digest = model_digest(model)
            _, end = await send(followed.node("b"), digest, [followed.node("a")])
    assert isinstance(end, InvalidModel)
    assert end.problem.startswith("the copy's SHA-256 is ")
    assert end.file == min(contents(model))
    assert not (tmp_path / "copies-b" / digest).exists()


@pytest.mark.asyncio
async def test_what_no_machine_has_is_refused_with_a_time(seen: Followed, model: Path) -> None:
    """It may be on a machine that comes back."""
    _, end = await send(seen.node("b"), model_digest(model), [])
    assert isinstance(end, PullInterrupted)
    assert f"no machine that can be reached has the files of {NOWHERE.name}" in str(end)
    assert end.retry_after_s == config.FLEET_SILENT_S


@pytest.mark.asyncio
async def test_bounds_of_what_is_offered(model: Path) -> None:
    """A part, the number of models, and of files: each is refused with its limit."""

    async def find(digest: str, path: str) -> str | None:
        return str(model)

    offers = Offers(find)
    for number in range(config.FLEET_OFFERS_MAX + 1):
        facts = await offers.offer(str(number), "")
    assert facts is not None
    latest, large = str(number), [fact.name for fact in facts].index(LARGE)
    assert len(await offers.read(latest, large, 0)) == config.FLEET_CHUNK_BYTES
    assert await offers.read(latest, large, LARGE_NBYTES - 1) == b"7"
    assert await offers.read(latest, large, LARGE_NBYTES) == b""
    with pytest.raises(InvalidRequest, match="not any more"):
        await offers.read("0", large, 0)
    for wrong in (-1, len(facts)):
        with pytest.raises(InvalidRequest, match=f"none of {len(facts)}"):
            await offers.sha256(latest, wrong)


@pytest.mark.asyncio
async def test_a_file_that_went_meanwhile_is_named(model: Path) -> None:
    """Whoever reads it, or sums it."""
    offer = await offer_of(model)
    (model / LARGE).unlink()
    number = [fact.name for fact in offer.facts].index(LARGE)
    for failing in (offer.read(number, 0), offer.sha256(number)):
        with pytest.raises(InvalidModel) as caught:
            await failing
        assert caught.value.file == LARGE
