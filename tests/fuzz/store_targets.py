"""Targets about files of models and of stores: each writes one model that is nearly right."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

from mlxd_controller.store.aliases import ALIASES_FILE, read_aliases
from mlxd_controller.store.folder import read_folder
from mlxd_controller.store.hub import HubShelf
from mlxd_controller.store.ollama import OllamaShelf
from mlxd_models.families.common.stored_layouts import as_stored
from mlxd_models.families.registry import REGISTRY, find_family
from mlxd_models.files.safetensors_header import read_whole_header
from mlxd_models.files.tensor_blobs import check_copies
from mlxd_models.files.weights import INDEX_FILE, SINGLE_FILE, read_weights
from tests.fuzz.inputs import flip, text_of, wrong
from tests.support.made_stores import JSON, TENSOR, OllamaStore, commit_of, tensor_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
    "max_position_embeddings": 64, "head_dim": 4, "layer_types": ["full_attention"] * 2,
    "sliding_window": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "num_experts": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": True,
    "quantization": {"group_size": 32, "bits": 4},
}  # fmt: skip
PACKED = "model.layers.0.self_attn.q_proj"
"""The one weight that is stored packed."""
TOKENIZER = b'{"model": {"vocab": {"a": 0}}}'
HEADER: dict[str, Any] = {
    "__metadata__": {"quant_type": "int4", "group_size": "32"},
    "a.weight": {"dtype": "U32", "shape": [2, 4], "data_offsets": [0, 32]},
    "a.scales": {"dtype": "F16", "shape": [2, 1], "data_offsets": [32, 36]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [36, 40]},
}
SIZES: dict[str, tuple[str, tuple[int, ...], bytes]] = {
    "a": ("F32", (2, 2), bytes(16)), "b": ("BF16", (4,), bytes(8)), "c": ("F32", (), bytes(4)),
}  # fmt: skip
NAMES = ("m", "o/m", "o/m@v1", "../m", "m:..", "o/m@../../x", "registry.ollama.ai/o/m:latest", "..")


def model_tensors() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the tensors of `CONFIG`: one weight packed, the others float32."""
    family = find_family(REGISTRY, CONFIG["architectures"][0])
    whole = [spec for spec in family.tensors(family.parse(CONFIG)) if spec.required]
    stored = {}
    for spec in as_stored(whole, {f"{PACKED}.scales"}):
        nbytes = 4 * math.prod(spec.shape)
        stored[spec.name] = (spec.dtype or "F32", spec.shape, bytes(nbytes))
    return stored


MODEL = tensor_file(model_tensors())


def safetensors_header(rng: random.Random, place: Path) -> None:
    """One file of weights."""
    path = place / SINGLE_FILE
    raw = text_of(wrong(HEADER, rng), rng)
    length = rng.choice([len(raw)] * 8 + [0, 1 << 20, 1 << 40, (1 << 64) - 1])
    content = length.to_bytes(8, "little") + raw + bytes(rng.choice([40, 40, 40, 0, 39, 41]))
    path.write_bytes(content[: rng.choice([len(content)] * 9 + [rng.randrange(len(content))])])
    read_whole_header(path)


def config_json(rng: random.Random, place: Path) -> None:
    """A folder whose config or defaults are odd."""
    which = rng.choice(("config", "defaults"))
    odd = text_of(wrong(CONFIG, rng), rng)
    (place / "config.json").write_bytes(odd if which == "config" else json.dumps(CONFIG).encode())
    (place / SINGLE_FILE).write_bytes(MODEL)
    (place / "tokenizer.json").write_bytes(TOKENIZER)
    defaults = {"temperature": 0.5, "top_k": 20, "do_sample": True, "eos_token_id": [1]}
    (place / "generation_config.json").write_bytes(text_of(wrong(defaults, rng), rng))
    read_folder(place)


def tokenizer_json(rng: random.Random, place: Path) -> None:
    """A folder whose tokenizer is missing, empty, a folder, a link or nothing of the kind."""
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / SINGLE_FILE).write_bytes(MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = place / name
        _remove(path)
        match rng.randrange(6):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(rng.choice(["/etc/passwd", "config.json", "nowhere", name, "/"]))
            case 2:
                path.write_bytes(flip(TOKENIZER, rng))
            case 3:
                path.write_bytes(text_of(wrong({"model": {"vocab": {"a": 0}}}, rng), rng))
            case 4:
                path.touch()
            case _:
                pass
    read_folder(place)


def shard_index(rng: random.Random, place: Path) -> None:
    """A folder of shards and an index, of which one thing is wrong."""
    _empty(place)
    which = rng.choice(("nothing", "index", "text", "place", "shard"))
    weight_map = {name: rng.choice(("1.safetensors", "2.safetensors")) for name in SIZES}
    for file in sorted(set(weight_map.values())):
        own = {name: tensor for name, tensor in SIZES.items() if weight_map[name] == file}
        (place / file).write_bytes(tensor_file(own))
        if which == "shard":
            _break(place / file, rng)
    if which == "place":
        weight_map[rng.choice(list(SIZES))] = rng.choice(["../1.safetensors", "/etc/passwd", "sub"])
    index: Any = {"metadata": {"total_size": 40}, "weight_map": weight_map}
    raw = json.dumps(wrong(index, rng) if which == "index" else index).encode()
    (place / INDEX_FILE).write_bytes(text_of(index, rng) if which == "text" else raw)
    read_weights(place)


def ollama_manifest(rng: random.Random, place: Path) -> None:
    """A store, by any name, of which one thing is wrong: several would hide each other."""
    _empty(place)
    which = rng.choice(("manifest", "metadata", "config", "blobs"))
    store = OllamaStore(place / "store")
    metadata: Any = {"quant_type": "int4", "group_size": "32"}
    bare = {key: value for key, value in CONFIG.items() if key != "quantization"}
    tensors = model_tensors()
    packed = f"{PACKED}.weight"
    parts = (("weight", packed), ("scales", f"{packed}.scale"), ("biases", f"{packed}.bias"))
    words = {name: tensors.pop(f"{PACKED}.{part}") for part, name in parts}
    layers = [
        store.layer(TENSOR, packed, tensor_file(words, _if(which == "metadata", metadata, rng))),
        *(
            store.layer(TENSOR, name, tensor_file({name: tensor}))
            for name, tensor in tensors.items()
        ),
        store.layer(JSON, "config.json", json.dumps(_if(which == "config", bare, rng)).encode()),
        store.layer(JSON, "tokenizer.json", TOKENIZER),
    ]
    manifest = store.manifest("m", layers)
    if which == "manifest":
        stated = wrong({"schemaVersion": 2, "layers": layers}, rng)
        manifest.write_bytes(text_of(stated, rng))
    for blob in sorted((store.root / "blobs").iterdir()):
        if which == "blobs" and rng.random() < 0.2:
            _break(blob, rng)
    shelf = OllamaShelf(store.root)
    for model in [
        *shelf.places(),
        *(found_place for name in NAMES if (found_place := shelf.find(name))),
    ]:
        if model.error is not None:
            raise model.error
        read_folder(model.path)
        check_copies(read_weights(model.path).copies)


def hub_refs(rng: random.Random, place: Path) -> None:
    """A hub's cache whose refs, links and snapshots are nearly right, by any name."""
    _empty(place)
    root, commit = place / "hub", commit_of("1")
    home = root / rng.choice(["models--o--m"] * 6 + ["models--m", "models--o--m--x", "models----"])
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    files = {"config.json": json.dumps(CONFIG).encode(), SINGLE_FILE: MODEL}
    files["tokenizer.json"] = TOKENIZER
    odd = ["/etc/passwd", f"../{commit}", "../../../../x"]
    for name, content in files.items():
        (home / "blobs" / name).write_bytes(content)
        (snapshot / name).symlink_to(rng.choice([f"../../blobs/{name}"] * 8 + [*odd, name]))
    ref = home / "refs" / rng.choice(["main", "v1", "a/b"])
    ref.parent.mkdir(parents=True)
    own = commit.encode()
    ref.write_bytes(rng.choice([own] * 5 + [b"../../..", b"", flip(own, rng)]))
    if rng.random() < 0.1:
        _break(ref, rng)
    shelf = HubShelf(root)
    for model in [
        *shelf.places(),
        *(found_place for name in NAMES if (found_place := shelf.find(name))),
    ]:
        if model.error is not None:
            raise model.error
        read_folder(model.path)


def aliases_file(rng: random.Random, place: Path) -> None:
    """The file of aliases."""
    stated = {"version": 1, "aliases": {"a": "o/m", "b": "m:latest", "c": "x"}}
    (place / ALIASES_FILE).write_bytes(text_of(wrong(stated, rng), rng))
    read_aliases(place)


TARGETS = (
    safetensors_header, config_json, tokenizer_json, shard_index, ollama_manifest, hub_refs,
    aliases_file,
)  # fmt: skip


def _if(chosen: bool, value: Any, rng: random.Random) -> Any:
    return wrong(value, rng) if chosen else value


def _break(path: Path, rng: random.Random) -> None:
    """Do to a file what disks and people do."""
    content = path.read_bytes()
    path.unlink()
    match rng.randrange(5):
        case 0:
            path.write_bytes(content[:-1])
        case 1:
            path.write_bytes(flip(content, rng))
        case 2:
            path.symlink_to(rng.choice(["/etc/passwd", path.name, "nowhere", ".."]))
        case 3:
            path.mkdir()
        case _:
            pass


def _empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
