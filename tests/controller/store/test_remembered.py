"""Names that loads gave outlive the server that was told: what is written, and what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.remembered import ASIDE_FILE, LOADED_FILE, RememberedNames
from mlxd_controller.store.shelves import library_of
from mlxd_shared.config import LOADED_NAMES_MAX
from mlxd_shared.domain.errors import ModelNotFound
from tests.support.tiny_model import write_tiny_model

WRITER = """
import itertools, sys
from pathlib import Path
from mlxd_controller.store.remembered import RememberedNames

names = RememberedNames(Path(sys.argv[1]))
for number in itertools.count():
    names.put(f"n{number}", Path(f"/m/{number}"))
    print(number, flush=True)
"""


def start(root: Path, *models: tuple[str, Path]) -> Library:
    """Return the models as a server that starts knows them."""
    return library_of(models, StorePlaces(root / "models", None, None))


@pytest.mark.asyncio
async def test_a_name_that_a_load_gave_is_known_after_a_restart(tmp_path: Path) -> None:
    """Until it is forgotten; what the next server is told itself goes before it."""
    folder, other = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    digest = (await start(tmp_path).add(folder, name="mine")).digest
    assert (await start(tmp_path).add(folder, name="")).aliases == ("mine",)

    assert (await start(tmp_path).resolve("mine")).digest == digest
    assert [ref.name for ref in await start(tmp_path).list_models()] == ["1"]
    assert (await start(tmp_path, ("mine", other)).resolve("mine")).digest != digest
    assert await start(tmp_path).forget("mine") == ("1",)
    with pytest.raises(ModelNotFound):
        await start(tmp_path).resolve("mine")
    assert (await start(tmp_path).resolve("1")).digest == digest


@pytest.mark.asyncio
async def test_a_folder_that_has_gone_is_listed_with_its_error(tmp_path: Path) -> None:
    """A disk that is not mounted yet loses no name."""
    folder = write_tiny_model(tmp_path / "m")
    await start(tmp_path).add(folder, name="mine")
    folder.rename(tmp_path / "elsewhere")
    (broken,) = await start(tmp_path).list_models()
    (tmp_path / "elsewhere").rename(folder)
    (whole,) = await start(tmp_path).list_models()

    assert (broken.name, whole.name) == ("mine", "mine")
    assert type(broken) is not type(whole)


def test_servers_that_share_a_directory_share_the_file(tmp_path: Path) -> None:
    """What one writes leaves what the other wrote; the oldest goes where there are too many."""
    first, second = RememberedNames(tmp_path), RememberedNames(tmp_path)
    first.put("a", Path("/m/a"))
    second.put("b", Path("/m/b"))
    first.put("c", Path("/m/c"), instead="a")
    assert first.read() == {"b": Path("/m/b"), "c": Path("/m/c")}

    folders = {f"n{number}": f"/m/{number}" for number in range(LOADED_NAMES_MAX)}
    written = json.dumps({"version": 1, "folders": folders})
    (tmp_path / LOADED_FILE).write_text(written)
    first.put("more", Path("/m"))
    second.drop("n1")
    assert list(second.read())[:2] == ["n2", "n3"]
    assert len(second.read()) == LOADED_NAMES_MAX - 1


BAD = {
    "torn": b'{"version": 1, "folders": {"a": "/m',
    "of a later version": b'{"version": 2, "folders": {}}',
    "of somebody else": b'["a"]',
    "with more": b'{"version": 1, "folders": {}, "more": 1}',
    "with a name that is none": b'{"version": 1, "folders": {"-": "/m"}}',
    "with a path that is none": b'{"version": 1, "folders": {"a": "m"}}',
    "with a zero in a path": b'{"version": 1, "folders": {"a": "/m\\u0000"}}',
    "too long": b'{"version": 1, "folders": {"a": "/' + b"m" * (16 << 20) + b'"}}',
    "with too many": json.dumps(
        {"version": 1, "folders": {f"n{i}": "/m" for i in range(LOADED_NAMES_MAX + 1)}}
    ).encode(),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_none_is_set_aside(kind: str, tmp_path: Path) -> None:
    """Whole, with a line in the log; what is loaded from then on is remembered."""
    (tmp_path / LOADED_FILE).write_bytes(BAD[kind])
    with capture_logs() as lines:
        assert RememberedNames(tmp_path).read() == {}
    RememberedNames(tmp_path).put("b", Path("/m/b"))

    assert [line["event"] for line in lines] == ["loaded names are lost"]
    assert lines[0]["file"] == str(tmp_path / ASIDE_FILE)
    assert (tmp_path / ASIDE_FILE).read_bytes() == BAD[kind]
    assert RememberedNames(tmp_path).read() == {"b": Path("/m/b")}


@pytest.mark.asyncio
async def test_where_nothing_can_be_written_models_are_loaded_all_the_same(tmp_path: Path) -> None:
    """The log says that they are not remembered; without a directory of mlxd's own nothing is."""
    (tmp_path / "models").write_text("a file")
    folder = write_tiny_model(tmp_path / "m")
    library = start(tmp_path)
    with capture_logs() as lines:
        assert (await library.add(folder, name="mine")).name == "mine"

    assert [line["event"] for line in lines] == ["loaded names are not remembered"]
    assert (await library.resolve("mine")).name == "mine"
    RememberedNames(None).put("a", folder)
    assert RememberedNames(None).read() == {}


def test_what_was_written_outlives_its_writer_whenever_that_is_killed(tmp_path: Path) -> None:
    """The file is whole after each blow, and has every name that was said to be in it."""
    for blow in range(5):
        folder = tmp_path / str(blow)
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline()) for _ in range(blow + 2)]
            writer.kill()
            said += map(int, writer.stdout.read().splitlines())

        assert {f"n{number}" for number in said} <= RememberedNames(folder).read().keys()
        assert not (folder / ASIDE_FILE).exists()
