"""What a router is told of a model, from its files, and its tokenizer as an archive."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mlxd.v1 import types_pb2
from mlxd_controller.router.about import chunks_of, digest_of, info_to_pb, zip_tokenizer
from mlxd_controller.store.shelves import demo_model
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.tokenizing.files import load_tokenizer


def model(**fields: Any) -> types_pb2.Model:
    """The demo model, as the controller shows it."""
    return types_pb2.Model(
        name="demo", digest="abc", path=str(demo_model()), architecture="LlamaForCausalLM",
        context_length_max=1024, vocab_size=4096, **fields,
    )  # fmt: skip


def test_a_router_is_told_what_a_model_is() -> None:
    """By the name of the port, with its limits and the values that it has where nothing is said."""
    sampling = types_pb2.SamplingOptions(temperature=0.8, top_p=0.95, top_k=40)
    info: Any = info_to_pb(model(effective_sampling=sampling), name="story")
    read = json.loads((demo_model() / "config.json").read_text(encoding="utf-8"))

    assert (info.served_model_name, info.model_path) == ("story", str(demo_model()))
    assert (info.max_context_length, info.max_req_input_len) == (1024, 1023)
    assert info.vocab_size == 4096
    assert info.is_generation
    assert info.model_type == read["model_type"]
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert info.bos_token_id == read["bos_token_id"]
    assert list(info.eos_token_ids)
    assert json.loads(info.default_sampling_params_json) == {
        "temperature": 0.8, "top_p": 0.95, "top_k": 40,
    }  # fmt: skip


def test_a_router_is_told_the_ends_that_the_worker_knows(tmp_path: Path) -> None:
    """Also where only the tokenizer's own files name them, as tokens; in the worker's order."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        content = json.loads((demo_model() / name).read_text(encoding="utf-8"))
        for field in ("eos_token_id", "bos_token_id", "eos_token", "bos_token"):
            content.pop(field, None)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    tokens = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    first, last = tokens[0], tokens[-1]
    names = {"bos_token": {"content": first["content"]}, "eos_token": last["content"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8")

    elsewhere = model()
    elsewhere.path = str(tmp_path)
    info: Any = info_to_pb(elsewhere, name="demo")
    ours = load_tokenizer(tmp_path)
    assert list(info.eos_token_ids) == [last["id"]] == list(ours.eos_ids)
    assert info.bos_token_id == first["id"] == ours.bos_id
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}', encoding="utf-8")
    again: Any = info_to_pb(elsewhere, name="demo")
    assert list(again.eos_token_ids) == [3, 5]


def test_a_loaded_model_s_context_is_the_one_in_force() -> None:
    """It may be shorter than the model's own; a model of vectors says that it is one."""
    info: Any = info_to_pb(model(context_length=512, has_pooling=True), name="demo")
    assert info.max_context_length == 512
    assert not info.is_generation


def test_the_tokenizer_s_path_is_nowhere() -> None:
    """A router on another machine must not take what it has at the model's path there."""
    info: Any = info_to_pb(model(), name="demo")
    assert not Path(info.tokenizer_path).exists()
    assert info.tokenizer_path.startswith("/")


def test_a_tokenizer_comes_in_parts_under_one_digest() -> None:
    """The last part alone has it; the parts together are the files, and equal each time."""
    archive = zip_tokenizer(demo_model())
    large = archive * (1 + 2 * config.MIB // len(archive))
    chunks: list[Any] = list(chunks_of(large, digest_of(large)))
    whole = b"".join(chunk.data for chunk in chunks)

    assert len(chunks) > 1
    assert {chunk.sha256 for chunk in chunks[:-1]} == {""}
    assert chunks[-1].sha256 == hashlib.sha256(whole).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            assert files.read(name) == (demo_model() / name).read_bytes()
        assert "model.safetensors" not in files.namelist()
    assert zip_tokenizer(demo_model()) == archive


def test_a_model_without_a_tokenizer_has_none_to_send(tmp_path: Path) -> None:
    """The file is named."""
    shutil.copy(demo_model() / "config.json", tmp_path)
    with pytest.raises(InvalidModel, match=r"tokenizer\.json"):
        zip_tokenizer(tmp_path)
