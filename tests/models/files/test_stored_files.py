"""A model's files: those of a folder, and nothing that a link would lead to elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mlxd_models.files.digest import model_digest
from mlxd_models.files.model_source import files_of
from mlxd_models.files.stored_files import StoredFiles, open_folder
from mlxd_models.files.weights import read_weights
from mlxd_shared.domain.errors import InvalidModel
from tests.support.made_stores import commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model


def test_a_snapshot_is_its_folder(tmp_path: Path) -> None:
    """A hub's snapshot, all links, is the same model as the folder it was made of; so is one whose
    repository keeps its blobs where all repositories do."""
    folder = write_tiny_model(tmp_path / "m")
    snapshot = write_hub_model(tmp_path / "hub", "o/m", folder, commit=commit_of("1"))
    assert model_digest(snapshot) == model_digest(folder)

    own = (snapshot / "config.json").resolve()
    shared = tmp_path / "hub" / "blobs" / "ab" / own.name
    shared.parent.mkdir(parents=True)
    shutil.move(own, shared)
    own.symlink_to(shared)
    assert model_digest(snapshot) == model_digest(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_link_that_leads_out_is_named_and_not_followed(
    name: str, cached: bool, tmp_path: Path
) -> None:
    """Whatever it would be read as, in a plain folder and in a snapshot."""
    folder = write_tiny_model(tmp_path / "m")
    if cached:
        folder = write_hub_model(tmp_path / "hub", "o/m", folder, commit=commit_of("1"))
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")

    with pytest.raises(InvalidModel, match="leads out of") as caught:
        open_folder(folder)
    assert caught.value.file == name


@pytest.mark.parametrize(
    ("link", "inner"),
    [
        ("1_Pooling", "config.json"),
        ("additional_chat_templates", "tool_use.jinja"),
        ("1_Pooling/config.json", ""),
        ("additional_chat_templates/tool_use.jinja", ""),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_folder_that_leads_out_is_named_and_never_passed_over(
    link: str, inner: str, cached: bool, tmp_path: Path
) -> None:
    """Nor is a file in one: the model would be another without it, with nothing said."""
    folder = write_tiny_model(tmp_path / "m")
    if cached:
        folder = write_hub_model(tmp_path / "hub", "o/m", folder, commit=commit_of("1"))
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / inner).parent.mkdir(parents=True, exist_ok=True)
    (elsewhere / inner if inner else elsewhere).write_text("{}")
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(elsewhere)

    with pytest.raises(InvalidModel, match="leads out of") as caught:
        model_digest(folder)
    assert caught.value.file == link


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors.index.json", "1_Pooling",
     "1_Pooling/config.json"],
)  # fmt: skip
def test_a_link_to_nothing_is_not_a_file_that_is_absent(name: str, tmp_path: Path) -> None:
    """Such as one to a blob that was removed: whoever asks for the file is told of the link."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("gone")

    with pytest.raises(InvalidModel, match="a link to nothing") as caught:
        model_digest(folder)
    assert caught.value.file == name


def test_a_shard_behind_a_link_that_leads_out_is_told_as_that(tmp_path: Path) -> None:
    """Also where its name says nothing of its format."""
    folder = write_tiny_model(tmp_path / "m")
    (tmp_path / "shard").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "shard").symlink_to(tmp_path / "shard")
    placed = {fact.name: "shard" for fact in read_weights(folder).facts}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))

    with pytest.raises(InvalidModel, match="leads out of") as caught:
        read_weights(folder)
    assert caught.value.file == "shard"


def test_a_file_where_a_folder_belongs_is_told(tmp_path: Path) -> None:
    """It is not as if there were nothing."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "1_Pooling").write_text("{}")
    with pytest.raises(InvalidModel, match="is not a folder") as caught:
        model_digest(folder)
    assert caught.value.file == "1_Pooling"


def test_a_change_in_a_folder_of_the_model_changes_the_signature(tmp_path: Path) -> None:
    """Its files are read too, and a folder's own times tell nothing of what is in its files."""
    folder = write_tiny_model(tmp_path / "m")
    settings = folder / "1_Pooling" / "config.json"
    settings.parent.mkdir()
    settings.write_text('{"pooling_mode": "mean"}')
    before = open_folder(folder).signature()
    settings.write_text('{"pooling_mode": "lasttoken"}')
    assert open_folder(folder).signature() != before


def test_what_is_not_read_may_lead_anywhere(tmp_path: Path) -> None:
    """A README behind a link is nobody's business; a link to nothing is no file; a loop is named;
    a name that no error could tell is passed over."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "README.md").symlink_to("/etc/hostname")
    (folder / "extra.json").symlink_to("nothing")
    (folder / os.fsdecode(b"lone\xff.json")).write_text("{}")
    files = open_folder(folder)
    assert not {"README.md", "extra.json"} & files.named.keys()
    assert all(name.isprintable() for name in files.named)

    (folder / "loop.json").symlink_to("loop.json")
    with pytest.raises(InvalidModel, match="loop"):
        open_folder(folder)


def test_blobs_of_all_repositories_lie_in_their_cache(tmp_path: Path) -> None:
    """Where that directory is a link itself, what lies behind it is nobody's."""
    folder = write_tiny_model(tmp_path / "m")
    snapshot = write_hub_model(tmp_path / "hub", "o/m", folder, commit=commit_of("1"))
    (tmp_path / "hub" / "blobs").symlink_to(tmp_path)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(InvalidModel, match="leads out of"):
        open_folder(snapshot)


def test_whatever_happens_to_a_file_changes_the_signature(tmp_path: Path) -> None:
    """Other bytes of the same length and the same old time; other permissions, after which a file
    that could not be read can be."""
    folder = write_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    times = weights.stat()
    seen = {open_folder(folder).signature()}
    weights.write_bytes(bytes(times.st_size))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    seen.add(open_folder(folder).signature())
    weights.chmod(0o600)
    seen.add(open_folder(folder).signature())
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("name", "words"), [("model.gguf", ".gguf"), ("pytorch_model.bin", ".bin")]
)
def test_weights_of_other_formats_are_named(name: str, words: str, tmp_path: Path) -> None:
    """A folder of a pickle or of GGUF is refused as what it is, and neither is opened."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"")
    with pytest.raises(InvalidModel) as caught:
        read_weights(folder)
    assert caught.value.file == name
    assert words in caught.value.problem


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    """Nothing there, a path that is too long, a file that is no manifest."""
    for path in (tmp_path / "none", tmp_path / ("a" * 300)):
        with pytest.raises(InvalidModel):
            files_of(path)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(InvalidModel, match="nor in a store"):
        files_of(tmp_path / "file")


def test_a_file_that_has_gone_is_no_signature(tmp_path: Path) -> None:
    """Files that were found and are not there any more are told, not left out."""
    files = StoredFiles(tmp_path, {"config.json": tmp_path / "config.json"})
    with pytest.raises(InvalidModel) as caught:
        files.signature()
    assert caught.value.file == "config.json"
