"""A model's files on a node: found by digest, or copied with progress, proved and resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from mlxd_controller.fleet.facts import FileFact
from mlxd_controller.fleet.files import PART, NodeFiles
from mlxd_controller.fleet.node import Node
from mlxd_controller.fleet.sending import STAGE, Sent, send_model
from mlxd_controller.settings import StorePlaces
from mlxd_models.files.digest import model_digest
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, PullFailed, StoreFull
from mlxd_shared.domain.figures import LoadProgress
from tests.support.fleets import FAKE, Blind, Nodes, follow, nodes_of
from tests.support.tiny_model import write_tiny_model

DIGEST = "e" * 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model on the controller's machine."""
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Where a node keeps copies."""
    return tmp_path / "copies"


@pytest.fixture
def blocked(copies: Path) -> Path:
    """A file where the folder of copies should be."""
    copies.touch()
    return copies


@pytest_asyncio.fixture
async def node(copies: Path) -> AsyncIterator[Node]:
    """A node that has no model but what is copied to it."""
    async with nodes_of(FAKE) as nodes:
        add_blind(nodes, copies)
        async with follow(nodes) as seen:
            yield seen.node("a")


def add_blind(nodes: Nodes, copies: Path) -> None:
    """Add such a node."""
    nodes.files["a"] = Blind(copies)
    nodes.add("a")


async def send(node: Node, digest: str, path: Path) -> tuple[list[LoadProgress], Sent]:
    """Return what was told on the way, and the end."""
    async with aclosing(send_model(node, digest, path)) as steps:
        values = [step async for step in steps]
    sent = values.pop()
    assert isinstance(sent, Sent)
    return [step for step in values if isinstance(step, LoadProgress)], sent


@pytest.mark.asyncio
async def test_a_path_that_the_node_sees_is_not_copied(model: Path, copies: Path) -> None:
    """Machines that mount one file system read from it, if the digest there is the model's."""
    async with nodes_of(FAKE) as nodes:
        nodes.files["a"] = NodeFiles(copies)
        nodes.add("a")
        async with follow(nodes) as seen:
            node = seen.node("a")
            assert await send(node, model_digest(model), model) == ([], Sent(str(model)))
            assert await node.find_model(DIGEST, str(model)) is None


@pytest.mark.asyncio
async def test_the_node_s_own_stores_are_asked_by_digest(model: Path, tmp_path: Path) -> None:
    """A model of a store there is used where it lies, whatever its name."""
    files = NodeFiles(tmp_path / "copies", StorePlaces(models_dir=tmp_path / "own"))
    own = write_tiny_model(tmp_path / "own" / "another-name")
    assert await files.find(model_digest(model), "/nowhere") == str(own)


@pytest.mark.asyncio
async def test_a_model_is_copied_with_progress_and_then_there(
    node: Node, model: Path, copies: Path
) -> None:
    """All that a load reads arrives under the digest; the next load finds it."""
    digest = model_digest(model)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "notes.txt").write_text("not read by anybody")
    digest = model_digest(model)

    steps, sent = await send(node, digest, model)

    assert sent.path == str(copies / digest)
    assert model_digest(Path(sent.path)) == digest
    assert {step.stage for step in steps} == {STAGE}
    assert [s.bytes_read for s in steps] == sorted(s.bytes_read for s in steps)
    assert steps[0].bytes_read == 0
    assert steps[-1].bytes_read == steps[-1].bytes_total > 0
    assert not (copies / digest / "notes.txt").exists()
    assert await send(node, digest, model) == ([], Sent(sent.path))


@pytest.mark.asyncio
async def test_a_copy_that_was_cut_off_goes_on(node: Node, model: Path) -> None:
    """What has arrived is not sent again, also half a file."""
    digest = model_digest(model)
    config_file = model / "config.json"
    half = config_file.read_bytes()[: config_file.stat().st_size // 2]
    whole = FileFact("config.json", config_file.stat().st_size)
    assert await node.begin_copy(digest, (whole,)) == (0,)
    await node.write_copy(digest, 0, 0, half)

    steps, sent = await send(node, digest, model)

    assert steps[0].bytes_read == len(half)
    assert model_digest(Path(sent.path)) == digest


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_read_here_is_named(node: Node, model: Path) -> None:
    """It is a fault of the model, or of this machine, never an error that nobody expects."""
    async with aclosing(send_model(node, model_digest(model), model)) as steps:
        await anext(steps)
        (model / "config.json").unlink()
        with pytest.raises(InvalidModel) as caught:
            await anext(steps)
    assert (caught.value.problem, caught.value.file) == ("missing", "config.json")


@pytest.mark.asyncio
async def test_a_snapshot_of_a_hub_is_copied_with_its_folders(node: Node, tmp_path: Path) -> None:
    """All its files, those in folders too, are links to the repository's blobs."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    written = write_tiny_model(tmp_path / "written")
    (written / "1_Pooling").mkdir()
    (written / "1_Pooling" / "config.json").write_text("{}")
    for number, file in enumerate(f for f in sorted(written.rglob("*")) if f.is_file()):
        blob = repository / "blobs" / str(number)
        link = snapshot / file.relative_to(written)
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        link.symlink_to(blob)
    digest = model_digest(snapshot)

    _, sent = await send(node, digest, snapshot)

    assert (Path(sent.path) / "1_Pooling" / "config.json").read_text() == "{}"
    assert model_digest(Path(sent.path)) == digest


@pytest.mark.asyncio
async def test_another_model_s_files_are_refused(node: Node, model: Path, copies: Path) -> None:
    """A copy with a wrong digest takes no place, and nothing of it stays."""
    with pytest.raises(InvalidModel, match="digest is"):
        await send(node, DIGEST, model)
    assert not (copies / DIGEST).exists()
    assert not (copies / DIGEST).with_suffix(PART).exists()


@pytest.mark.asyncio
async def test_a_file_that_is_not_its_source_s_is_removed_by_name(node: Node, model: Path) -> None:
    """All others stay; the next copy brings that file alone, and without a sum nothing is whole."""
    digest, text = model_digest(model), b"x" * (model / "config.json").stat().st_size
    await node.begin_copy(digest, (FileFact("config.json", len(text)),))
    await node.write_copy(digest, 0, 0, text)
    with pytest.raises(InvalidModel, match="not compared"):
        await node.finish_copy(digest)

    with pytest.raises(InvalidModel, match="SHA-256 is") as caught:
        await send(node, digest, model)
    assert caught.value.file == "config.json"
    steps, sent = await send(node, digest, model)
    assert steps[-1].bytes_read - steps[0].bytes_read >= len(text)
    assert model_digest(Path(sent.path)) == digest


@pytest.mark.asyncio
async def test_a_copy_that_is_not_whole_is_refused(node: Node) -> None:
    """It keeps what has arrived, and takes no place."""
    await node.begin_copy(DIGEST, (FileFact("config.json", 3),))
    await node.write_copy(DIGEST, 0, 0, b"ab")
    with pytest.raises(InvalidModel, match="not whole"):
        await node.finish_copy(DIGEST)
    assert await node.begin_copy(DIGEST, (FileFact("config.json", 3),)) == (2,)


@pytest.mark.asyncio
@pytest.mark.parametrize(("offset", "chunk"), [(1, b"a"), (0, b"abcd")])
async def test_what_does_not_follow_is_refused(node: Node, offset: int, chunk: bytes) -> None:
    """Neither a gap nor more than was announced."""
    await node.begin_copy(DIGEST, (FileFact("config.json", 3),))
    with pytest.raises(InvalidRequest, match="offset"):
        await node.write_copy(DIGEST, 0, offset, chunk)


@pytest.mark.asyncio
async def test_a_copy_that_was_not_begun_is_refused(node: Node) -> None:
    """As one of an agent that has restarted: the node is not lost for that."""
    with pytest.raises(InvalidRequest, match="begun"):
        await node.write_copy(DIGEST, 0, 0, b"a")
    with pytest.raises(InvalidRequest, match="begun"):
        await node.finish_copy(DIGEST)
    await node.begin_copy(DIGEST, (FileFact("config.json", 3),))
    for number in (-1, 1):
        with pytest.raises(InvalidRequest, match="none of 1"):
            await node.write_copy(DIGEST, number, 0, b"a")
        with pytest.raises(InvalidRequest, match="none of 1"):
            await node.check_copy(DIGEST, number, DIGEST)
    assert not node.lost


@pytest.mark.asyncio
async def test_what_a_node_s_disk_refuses_is_the_copy_s_error(node: Node, blocked: Path) -> None:
    """The load fails; the node is not lost for that."""
    with pytest.raises(PullFailed, match=blocked.name):
        await node.begin_copy(DIGEST, (FileFact("config.json", 3),))
    assert not node.lost


@pytest.mark.asyncio
async def test_bounds_of_a_copy(node: Node) -> None:
    """A chunk, the number of files, and the disk: each is refused with its limit."""
    await node.begin_copy(DIGEST, (FileFact("config.json", 1 << 30),))
    with pytest.raises(InvalidRequest, match=str(config.FLEET_CHUNK_BYTES)):
        await node.write_copy(DIGEST, 0, 0, bytes(config.FLEET_CHUNK_BYTES + 1))
    many = tuple(FileFact(f"{n}.json", 0) for n in range(config.FLEET_FILES_MAX + 1))
    with pytest.raises(InvalidRequest, match=str(config.FLEET_FILES_MAX)):
        await node.begin_copy(DIGEST, many)
    with pytest.raises(StoreFull):
        await node.begin_copy(DIGEST, (FileFact("config.json", 1 << 60),))


@pytest.mark.asyncio
async def test_a_copy_leaves_the_disk_its_reserve(model: Path, copies: Path) -> None:
    """As a pull does: before it begins, and where others fill the disk; what has arrived stays."""
    free = [config.PULL_RESERVE_BYTES + 3]
    async with nodes_of(FAKE) as nodes:
        nodes.files["a"] = Blind(copies, free_of=lambda _: free[0])
        nodes.add("a")
        async with follow(nodes) as seen:
            node = seen.node("a")
            full = r"copies has 1\.0 GiB free, .* are needed, and 1\.0 GiB stay in reserve"
            with pytest.raises(StoreFull, match=f"the node's disk of .*{full}"):
                await send(node, model_digest(model), model)
            assert await node.begin_copy(DIGEST, (FileFact("config.json", 3),)) == (0,)
            await node.write_copy(DIGEST, 0, 0, b"a")
            free[0] = config.PULL_RESERVE_BYTES + 1
            with pytest.raises(StoreFull, match="in reserve; what has arrived stays"):
                await node.write_copy(DIGEST, 0, 1, b"bc")
            free[0] += 1
            assert await node.begin_copy(DIGEST, (FileFact("config.json", 3),)) == (1,)
            await node.write_copy(DIGEST, 0, 1, b"bc")
            free[0] = 0
            assert await node.begin_copy(DIGEST, (FileFact("config.json", 3),)) == (3,)
            assert not node.lost


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/b.json", "..", ""])
async def test_a_name_that_leads_elsewhere_is_refused(node: Node, name: str) -> None:
    """A copy stays in its folder."""
    with pytest.raises(InvalidRequest, match="no name"):
        await node.begin_copy(DIGEST, (FileFact(name, 1),))


@pytest.mark.asyncio
async def test_a_digest_that_is_none_is_refused(node: Node) -> None:
    """It names a folder."""
    with pytest.raises(InvalidRequest, match="digest"):
        await node.find_model("../x", "/nowhere")
