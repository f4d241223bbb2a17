"""Describing a model: what can be served, by config and headers; all else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxd_models.describe import describe
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.foreign import parse_foreign
from mlxd_models.families.llama import LLAMA, parse_llama
from mlxd_models.fit.described import facts_of
from mlxd_models.fit.plan import WEIGHTS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.cache_sizes import Held
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_shared.domain.units import format_bytes
from tests.support.hollow_model import write_hollow
from tests.support.made_weights import PACKING, write_weights
from tests.support.model_facts import device

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
PACKABLE = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64
"""Values of the one layer's matrices."""
FINER = 2 * 32 * 64 + 128 * 64
"""Those of keys, values and the projection down."""
TABLES = 2 * 128 * 64
"""Values of embedding and head."""
NORMS = 3 * 64
COHERE = {**SMALL, "architectures": ["CohereForCausalLM"], "model_type": "cohere"}


def test_a_model_is_described_by_its_headers(tmp_path: Path) -> None:
    """Sizes follow from config and headers; the weights themselves are holes in the file."""
    described = describe(write_hollow(tmp_path, SMALL))

    assert described.family is LLAMA
    assert described.weight_values == PACKABLE + TABLES + NORMS
    assert described.stored is FloatType.F32
    assert not described.packed
    assert described.footprint.context_max == 512
    assert described.footprint.caches.kv_values_per_token == 2 * 32
    assert {fact.name for fact in described.facts} == {
        spec.name for spec in described.specs if spec.required
    }


@pytest.mark.parametrize(
    ("weights", "nbytes"),
    [
        (Weights.Q4, PACKABLE // 2 + 4 * (TABLES + NORMS + 2 * PACKABLE // 64)),
        (Weights.MIXED_4_8, (PACKABLE + FINER) // 2 + 4 * (TABLES + NORMS + 2 * PACKABLE // 64)),
        (Weights.MXFP8, PACKABLE + PACKABLE // 32 + 4 * (TABLES + NORMS)),
    ],
)
def test_what_a_load_packs_is_known_before_it(
    weights: Weights, nbytes: int, tmp_path: Path
) -> None:
    """Matrices of layers are packed, their scales numbers or bytes; tables and norms are kept."""
    facts = facts_of(describe(write_hollow(tmp_path, SMALL)))
    plan = plan_load(facts, LoadSpec(weights=weights), device(1 << 20))

    packed = facts.packed_on_load(weights)
    assert (packed.values, packed.unpacked_values) == (PACKABLE, 4 * PACKABLE)
    assert plan.nbytes_of(WEIGHTS_TERM) == nbytes


@pytest.mark.parametrize(("vocab", "is_more"), [(1024, True), (128, False)])
def test_packing_that_takes_more_than_what_is_stored_says_so(
    vocab: int, is_more: bool, tmp_path: Path
) -> None:
    """Tables of 16 bits are widened on a CPU: of a small model with many words they are most."""
    folder = write_hollow(tmp_path, {**SMALL, "vocab_size": vocab}, stored=FloatType.BF16)
    facts = facts_of(describe(folder))
    packed, stored = (
        plan_load(facts, LoadSpec(weights=weights), device(1 << 20))
        for weights in (Weights.Q4, Weights.STORED)
    )
    (term,) = (term for term in packed.terms if term.name == WEIGHTS_TERM)
    stored_bytes = stored.nbytes_of(WEIGHTS_TERM)

    assert (term.nbytes > stored_bytes) is is_more
    said = f": more than the {format_bytes(stored_bytes)} as stored"
    assert term.note.endswith(said) is is_more


def test_what_is_stored_packed_is_counted_in_words(tmp_path: Path) -> None:
    """Four bits a value, and a scale and an offset for each group; of tables too, if stored so."""
    described = describe(write_weights(tmp_path, SMALL, stored="4-bit"))
    stored = PACKABLE + TABLES

    assert described.packed
    assert described.kept == Held(NORMS + 2 * stored // PACKING["group_size"], stored // 2)
    assert facts_of(described).unpacked_values == 4 * PACKABLE
    assert described.weight_values == stored + NORMS


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a change of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def cut(folder: Path) -> None:
    """Cut the last byte of the weights off."""
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


REFUSED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "nobody's": (edit(architectures=["FooForCausalLM"]), "config.json", "architectures"),
    "no architecture": (edit(architectures=[]), "config.json", "architectures"),
    "a nonsense rope": (
        edit(rope_scaling={"rope_type": "nonsense"}), "config.json", "rope_scaling.rope_type",
    ),
    "a wrong type": (edit(hidden_size="64"), "config.json", "hidden_size"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json", ""),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors", ""),
    "weights cut off": (cut, "model.safetensors", "model.layers.0.mlp.down_proj.weight"),
    "a layer too few": (
        edit(num_hidden_layers=2), "model.safetensors", "model.layers.1.input_layernorm.weight",
    ),
    "another width": (
        edit(intermediate_size=96), "model.safetensors", "model.layers.0.mlp.gate_proj.weight",
    ),
    "a head that is tied": (
        edit(tie_word_embeddings=True, vocab_size=64),
        "model.safetensors", "model.embed_tokens.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_file_and_key(name: str, tmp_path: Path) -> None:
    """The file and the key or tensor that are wrong are in the error, whoever asks."""
    change, file, field = REFUSED[name]
    folder = write_hollow(tmp_path, SMALL)
    change(folder)

    with pytest.raises(InvalidModel) as caught:
        describe(folder)

    assert (caught.value.file, caught.value.field) == (file, field)


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    """Give the stored tensors other names."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = {new_name(name): entry for name, entry in json.loads(whole[8:end]).items()}
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + whole[end:])


def without_inner(name: str) -> str | None:
    """Return a name as a family has it whose tensors are stored in `inner`; None for `seen`."""
    return None if name == "inner.seen" else name.removeprefix("inner.")


def refuse_all(config: Any, facts: Any) -> tuple[TensorSpec, ...]:
    """Refuse the first tensor, as a family that reads by rules of its own may."""
    del config
    raise InvalidModel("is of no use", file=facts[0].file.name, field=facts[0].name)


def test_a_familys_own_rules_decide_where_it_has_some(tmp_path: Path) -> None:
    """`restore` stands in for the list of tensors; models of mlx-lm's alone are read by such."""
    folder = write_hollow(tmp_path, SMALL)
    edit(**COHERE)(folder)
    foreign = Family("theirs", parse_llama, LLAMA.tensors, LLAMA.footprint, restore=refuse_all)

    with pytest.raises(InvalidModel) as unknown:
        describe(folder)
    with pytest.raises(InvalidModel) as refused:
        describe(folder, foreign=foreign)

    assert unknown.value.field == "architectures"
    assert refused.value.problem == "is of no use"


def test_our_own_families_are_never_foreign(tmp_path: Path) -> None:
    """What mlx-lm has too is ours where a family of ours is registered."""
    foreign = Family("theirs", parse_llama, LLAMA.tensors, LLAMA.footprint, restore=refuse_all)
    folder = write_hollow(tmp_path, {**SMALL, "model_type": "cohere"})

    assert describe(folder, foreign=foreign).family is LLAMA


def test_what_is_nested_deeper_than_calls_is_looked_at_too() -> None:
    """Counts of mlx-lm's models, wherever an object has them: as deep as a reader of JSON gets."""
    config: dict[str, Any] = {"num_experts": 4096}
    for _ in range(5000):
        config = {"in": config}
    parse_foreign({**COHERE, **config})

    with pytest.raises(InvalidModel) as caught:
        parse_foreign({**COHERE, "in": {"in": {"num_experts": 4097}}})
    assert caught.value.field == "in.in.num_experts"


def test_tensors_have_the_familys_names_and_errors_the_files(tmp_path: Path) -> None:
    """A family may know tensors by other names; what is wrong is named as it is stored."""
    folder = write_hollow(tmp_path, {**SMALL, "vocab_size": 64})
    rename(folder, lambda name: f"inner.{name}")
    family = Family("llama", parse_llama, LLAMA.tensors, LLAMA.footprint, name_of=without_inner)
    registry = {"LlamaForCausalLM": family}

    described = describe(folder, registry=registry)
    edit(vocab_size=65)(folder)
    with pytest.raises(InvalidModel) as caught:
        describe(folder, registry=registry)

    assert all(fact.stored_name == f"inner.{fact.name}" for fact in described.facts)
    assert caught.value.field == f"inner.{described.facts[0].name}"


def test_a_tensor_that_is_known_may_be_left_unread(tmp_path: Path) -> None:
    """One without a name in the family is no part of the description; a second of one name is
    refused."""
    folder = write_hollow(tmp_path, SMALL)
    family = Family("llama", parse_llama, LLAMA.tensors, LLAMA.footprint, name_of=without_inner)
    registry = {"LlamaForCausalLM": family}
    head, norm = "lm_head.weight", "model.norm.weight"
    edit(tie_word_embeddings=True)(folder)
    rename(folder, lambda name: "inner.seen" if name == head else name)

    described = describe(folder, registry=registry)
    rename(folder, lambda name: f"inner.{norm}" if name == "inner.seen" else name)
    with pytest.raises(InvalidModel) as caught:
        describe(folder, registry=registry)

    assert head not in {fact.name for fact in described.facts}
    assert caught.value.problem == f"is {norm}, which is stored under another name too"
