"""A folder's facts: what fit reckons with, and what is wrong with a folder, by file and key."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.runtime.ports import HubOrigin
from mlxd_controller.store.folder import read_folder
from mlxd_controller.store.model_library import Library
from mlxd_models.fit.facts import Taken
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_shared.config import TOKENIZER_FILE_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound
from tests.real_inputs import real_input
from tests.support.made_stores import commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model


def change_config(folder: Path, **values: Any) -> None:
    """Change keys of config.json; None takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a file of zeros with this header: dtype, shape, bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


def test_facts_of_a_real_model() -> None:
    """Against a real trained model, counted by hand from its config."""
    folder = read_folder(real_input("models", "stories260k"))
    facts = folder.facts
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.passes.heads, facts.passes.projected) == (8, 16 * 8)
    assert facts.caches == CacheSizes(kv_values_per_token=5 * 2 * 4 * 8, kv_heads=4, head_dim=8)
    assert facts.elements == 260_032
    assert facts.stored_bytes == 4 * facts.elements
    assert (facts.passes.vocab, facts.context_length_max) == (512, 512)


def test_a_snapshot_of_a_hub_tells_where_it_is_from(tmp_path: Path) -> None:
    """Its repository, its commit, and what its links say of the files that a load reads; a folder
    elsewhere tells nothing, and a copy in place of a link nothing of that file."""
    written, commit = write_tiny_model(tmp_path / "tiny"), commit_of("1")
    (written / "notes.txt").write_text("not read by anybody")
    (written / "odd.json").write_text("{}")
    snapshot = write_hub_model(tmp_path / "hub", "o/m", written, commit=commit)
    below, blobs = snapshot / "1_Pooling", snapshot.parents[1] / "blobs"
    below.mkdir()
    (below / "config.json").symlink_to(blobs / hashlib.sha256(b"{}").hexdigest())
    (snapshot / "odd.json").unlink()
    (snapshot / "odd.json").write_text("{}")
    contents = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in written.iterdir()
        if path.name not in {"notes.txt", "odd.json"}
    }
    contents["1_Pooling/config.json"] = hashlib.sha256(b"{}").hexdigest()

    assert read_folder(snapshot).origin == HubOrigin("o/m", commit, tuple(sorted(contents.items())))
    assert read_folder(written).origin is None
    assert read_folder(snapshot.rename(snapshot.with_name("main"))).origin is None


def test_what_a_load_makes_and_what_it_leaves_out(tmp_path: Path) -> None:
    """Each size with what comes after it, and of equal ones the last; a copy of a tied head and an
    old table are no need; the tokenizer is."""
    folder = write_tiny_model(tmp_path / "m")
    change_config(folder, tie_word_embeddings=True, hidden_size=4, head_dim=2,
                  num_attention_heads=2, num_key_value_heads=1, intermediate_size=50,
                  vocab_size=100)  # fmt: skip
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [100, 4], "model.norm.weight": [4]}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}mlp.{name}_proj.weight": [50, 4] for name in ("gate", "up")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": [2, 4] for name in "kv"}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": [4, 4] for name in "qo"}
        shapes |= {f"{layer}mlp.down_proj.weight": [4, 50]}
        shapes |= {f"{layer}{name}_layernorm.weight": [4] for name in ("input", "post_attention")}
    left = {"lm_head.weight": ("BF16", [100, 4], 800),
            "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [1], 4)}  # fmt: skip
    tensors = {name: ("BF16", shape, 2 * math.prod(shape)) for name, shape in shapes.items()}

    write_safetensors(folder / "model.safetensors", tensors | left)
    facts = read_folder(folder).facts

    assert facts.taken == (
        Taken(4, 8, joined=False),
        Taken(200, 400, joined=False, later_values=4, later_bytes=8),
        Taken(400, 800, joined=True, later_values=204, later_bytes=408),
        Taken(16, 32, joined=False, later_values=604, later_bytes=1208),
        Taken(32, 64, joined=True, later_values=620, later_bytes=1240),
        Taken(400, 800, joined=False, later_values=1316, later_bytes=2632),
    )
    assert facts.dropped_bytes == 800 + 4
    assert facts.stored_bytes - facts.dropped_bytes == 2 * facts.elements == 2 * 1716
    assert facts.item_bytes == 2
    assert facts.tokenizer_bytes == (folder / "tokenizer.json").stat().st_size > 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "Llama"}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
        ({"num_attention_heads": True}, "num_attention_heads"),
    ],
)
def test_a_bad_key_is_named(values: dict[str, Any], field: str, tmp_path: Path) -> None:
    """Missing, mistyped and out of range: InvalidModel about this key of config.json."""
    folder = write_tiny_model(tmp_path / "m")
    change_config(folder, **values)
    with pytest.raises(InvalidModel) as caught:
        read_folder(folder)
    assert (caught.value.file, caught.value.field) == ("config.json", field)


def unlink(folder: Path) -> None:
    """Take the tokenizer's file away."""
    (folder / "tokenizer.json").unlink()


def make_empty(folder: Path) -> None:
    """Leave nothing in the tokenizer's file."""
    (folder / "tokenizer.json").write_bytes(b"")


def make_folder(folder: Path) -> None:
    """Put a folder in the place of the tokenizer's file."""
    unlink(folder)
    (folder / "tokenizer.json").mkdir()


def make_huge(folder: Path) -> None:
    """Make the tokenizer's file one byte longer than is read."""
    os.truncate(folder / "tokenizer.json", TOKENIZER_FILE_BYTES_MAX + 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (unlink, "is missing; mlxd reads this format only"),
        (make_empty, "empty"),
        (make_folder, "not a regular file"),
        (make_huge, f"over {TOKENIZER_FILE_BYTES_MAX} bytes long"),
    ],
)
def test_a_model_without_a_tokenizer_is_none(
    change: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    """No worker could load it: it is refused by the file's name, and none of it is read."""
    folder = write_tiny_model(tmp_path / "m")
    change(folder)
    with pytest.raises(InvalidModel) as caught:
        read_folder(folder)
    assert (caught.value.file, caught.value.problem) == ("tokenizer.json", problem)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_what_stands_beside_a_tokenizer_is_json(file: str, tmp_path: Path) -> None:
    """A worker reads it before it loads anything: half of a file is refused here."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / file).write_text('{"eos_token": ')
    with pytest.raises(InvalidModel, match="not JSON") as caught:
        read_folder(folder)
    assert caught.value.file == file


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "missing"), (b"{", "not JSON"), (b"[]", "not a JSON object")],
)
def test_a_bad_config_is_named(content: bytes | None, problem: str, tmp_path: Path) -> None:
    """Not there, not JSON, not an object."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(InvalidModel, match=problem) as caught:
        read_folder(folder)
    assert caught.value.file == "config.json"


@pytest.mark.asyncio
async def test_a_folder_is_read_again_when_it_has_changed_and_not_before(tmp_path: Path) -> None:
    """Other weights are another model under the same name; equal files are not read twice."""
    folder = write_tiny_model(tmp_path / "m", seed=1)
    store = Library([("m", folder)])
    first = await store.resolve("m")
    assert (await store.resolve("m")).facts is first.facts

    write_tiny_model(folder, seed=2)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = await store.resolve("m")

    assert second.digest != first.digest
    assert store.find_known(first.digest) == first


@pytest.mark.asyncio
async def test_a_path_that_no_message_can_carry_is_refused(tmp_path: Path) -> None:
    """A folder behind a link has a path of its own; one that is not UTF-8 is named as such."""
    write_tiny_model(tmp_path / "m").rename(tmp_path / os.fsdecode(b"lone\xff"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / os.fsdecode(b"lone\xff"))
    store = Library([])
    for ask in (store.add, store.inspect):
        with pytest.raises(InvalidRequest, match="not UTF-8"):
            await ask(link, name="m")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        Library([("m", link)])
    assert await store.list_models() == ()


@pytest.mark.asyncio
async def test_a_path_that_leads_nowhere_is_not_found(tmp_path: Path) -> None:
    """Too long a name, a loop of links, a file: each has no model."""
    loop, file = tmp_path / "loop", tmp_path / "file"
    loop.symlink_to(loop)
    file.touch()
    store = Library([])
    for path in (tmp_path / ("a" * 300), loop, loop / "m", file):
        with pytest.raises(ModelNotFound):
            await store.add(path, name="m")


def test_names_are_checked_where_they_are_given(tmp_path: Path) -> None:
    """Twice the same, or nothing that a command line could name."""
    with pytest.raises(InvalidRequest, match="twice"):
        Library([("m", tmp_path), ("m", tmp_path)])
    for bad in ("", " ", "a b", "x" * 600, "/abs"):
        with pytest.raises(InvalidRequest, match="name"):
            Library([(bad, tmp_path)])
