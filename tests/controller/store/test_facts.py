"""A folder's facts: what fit reckons with, and what is wrong with a folder, by file and key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.store.facts import _made_of, read_folder
from mlxd_controller.store.model_library import Library
from mlxd_models.fit.facts import Taken
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound
from tests.real_inputs import real_input
from tests.support.tiny_model import LAYERS, write_tiny_model


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
    assert (facts.heads, facts.projected_values) == (8, 16 * 8)
    assert facts.caches == CacheSizes(kv_values_per_token=5 * 2 * 4 * 8, kv_heads=4, head_dim=8)
    assert facts.elements == 260_032
    assert facts.stored_bytes == 4 * facts.elements
    assert (facts.vocab_size, facts.context_length_max) == (512, 512)


def test_packed_weights_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    """8 values of 4 bits in a U32, scales and biases beside them: counted once dequantised."""
    folder = write_tiny_model(tmp_path / "m")
    change_config(
        folder, quantization={"group_size": 64, "bits": 4, "b": {"group_size": 64, "bits": 8}}
    )
    write_safetensors(
        folder / "model.safetensors",
        {
            "a.weight": ("U32", [10, 8], 320), "a.scales": ("F16", [10, 1], 20),
            "a.biases": ("F16", [10, 1], 20), "b.weight": ("U32", [4, 4], 64),
            "b.scales": ("F16", [4, 1], 8), "norm.weight": ("F16", [7], 14),
        },
    )  # fmt: skip
    facts = read_folder(folder).facts
    assert facts.elements == 10 * 8 * 8 + 4 * 4 * 4 + 7
    assert facts.item_bytes == 2
    assert facts.unpacked_values == 0  # none of them in a layer
    change_config(folder, quantization=None)
    with pytest.raises(InvalidModel, match="quantization"):
        read_folder(folder)


def test_what_a_load_makes_and_what_it_leaves_out(tmp_path: Path) -> None:
    """Each size with what comes after it, and of equal ones the last; a copy of a tied head, an old
    table and a head for guessing are no need; the tokenizer is."""
    folder = write_tiny_model(tmp_path / "m")
    change_config(folder, tie_word_embeddings=True)
    layer, last = "model.layers.0.", "model.layers.10."
    write_safetensors(
        folder / "model.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", [100, 4], 800),
            f"{layer}mlp.gate_proj.weight": ("BF16", [50, 4], 400),
            f"{layer}mlp.up_proj.weight": ("BF16", [50, 4], 400),
            f"{layer}mlp.down_proj.weight": ("BF16", [4, 50], 400),
            f"{last}mlp.gate_proj.weight": ("BF16", [50, 4], 400),
            f"{last}mlp.up_proj.weight": ("BF16", [50, 4], 400),
            f"{last}mlp.down_proj.weight": ("BF16", [4, 50], 400),
            f"{last}self_attn.q_proj.weight": ("BF16", [25, 4], 200),
            f"{last}self_attn.o_proj.weight": ("BF16", [4, 10], 80),
            f"{layer}self_attn.rotary_emb.inv_freq": ("F32", [8], 32),
            "lm_head.weight": ("BF16", [100, 4], 800),
            "mtp.fc.weight": ("BF16", [500, 4], 4000),
        },
    )
    facts = read_folder(folder).facts
    assert facts.taken == (
        Taken(200, 400, joined=False),
        Taken(400, 800, joined=True, later_values=200, later_bytes=400),
        Taken(40, 80, joined=False, later_values=600, later_bytes=1200),
        Taken(100, 200, joined=True, later_values=640, later_bytes=1280),
        Taken(400, 800, joined=False, later_values=1340, later_bytes=2680),
    )
    assert facts.dropped_bytes == 32 + 800 + 4000
    assert facts.stored_bytes - facts.dropped_bytes == 2 * facts.elements == 3480
    assert facts.item_bytes == 2
    assert facts.tokenizer_bytes == (folder / "tokenizer.json").stat().st_size > 0
    change_config(folder, tie_word_embeddings=None)
    assert read_folder(folder).facts.dropped_bytes == 32 + 4000


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


def test_absent_keys_with_a_meaning_take_it(tmp_path: Path) -> None:
    """No KV heads means as many as heads; no head_dim means hidden over heads."""
    folder = write_tiny_model(tmp_path / "m")
    change_config(folder, num_key_value_heads=None, head_dim=None)
    facts = read_folder(folder).facts
    assert facts.heads == 4
    assert facts.caches.head_dim == 8
    assert facts.caches.kv_values_per_token == LAYERS * 2 * 4 * 8


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
    assert store.known(first.digest) == first


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
    assert await store.listed() == ()


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


@pytest.mark.parametrize(
    ("name", "made_of"),
    [
        ("model.layers.1.mlp.gate_proj.weight", ("model.layers.1.mlp", True)),
        ("model.layers.1.mlp.down_proj.weight", ("model.layers.1.mlp.down_proj", False)),
        ("model.layers.1.mlp.experts.7.up_proj.weight", ("model.layers.1.mlp.experts", True)),
        (
            "model.layers.1.mlp.experts.7.down_proj.weight",
            ("model.layers.1.mlp.experts.down_proj", True),
        ),
        ("model.layers.1.mlp.switch_mlp.up_proj.weight", ("model.layers.1.mlp.switch_mlp", True)),
        ("lm_head.weight", ("lm_head", False)),
    ],
)
def test_which_tensors_a_load_puts_together(name: str, made_of: tuple[str, bool]) -> None:
    """Projections of one input, and the experts of a layer that are stored one by one."""
    assert _made_of(name) == made_of
