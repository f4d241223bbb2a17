"""A model is planned as it is described: which life it has in which memory, and what is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_models.describe import Description, describe
from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.fit.described import Life, facts_of, life_of
from mlxd_models.fit.plan import PROCESS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import GIB
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec, Weights
from tests.support.hollow_model import write_hollow
from tests.support.made_weights import write_weights
from tests.support.model_facts import device

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
TINY = {**SMALL, "hidden_size": 576 // 9, "num_attention_heads": 1, "num_key_value_heads": 1} | {
    "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 128,
}  # fmt: skip


def in_halves(folder: Path, config: dict[str, Any]) -> Description:
    """Return the description of a model that says bfloat16, none of whose weights is there."""
    described = describe(write_hollow(folder, config))
    facts = tuple(replace(fact, dtype=FloatType.BF16) for fact in described.facts)
    return replace(described, facts=facts)


@pytest.mark.parametrize(
    ("config", "budget_gib", "weights", "context"),
    [
        (SMALL, 1, Weights.STORED, 4096),
        (SMALL, 2, Weights.FLOAT32, 4096),
        (SMALL, 8, Weights.FLOAT32, 8192),
        (LARGE, 20, Weights.STORED, 8192),
        (LARGE, 40, Weights.FLOAT32, 8192),
        (LARGE, 64, Weights.FLOAT32, 16_384),
        (LARGE, 400, Weights.FLOAT32, 131_072),
    ],
)
def test_what_lives_how_in_how_much_memory(
    config: dict[str, Any], budget_gib: int, weights: Weights, context: int, tmp_path: Path
) -> None:
    """135 million and 8 billion values as bfloat16 on a CPU; whether a process is to come too, or
    is there already, these budgets do not change."""
    facts = facts_of(in_halves(tmp_path, config))
    host = device(budget_gib * GIB >> 20)
    for each in (host, replace(host, holds_process=True)):
        plan = plan_load(facts, LoadSpec(), each)
        assert (plan.weights, plan.context_length) == (weights, context)
        assert plan.need_bytes <= host.budget_bytes
        assert bool(plan.nbytes_of(PROCESS_TERM)) is not each.holds_process


def life_of_load(described: Description, weights: Weights, *, on_cpu: bool) -> Life:
    """Return what a load makes of the weights where there is room for anything."""
    host = device(1 << 20, kind="cpu" if on_cpu else "cuda")
    plan = plan_load(facts_of(described), LoadSpec(weights=weights), host)
    return life_of(plan, described, on_cpu=on_cpu)


@pytest.mark.parametrize("kind", DeviceKind)
def test_numbers_are_told_by_their_form(kind: DeviceKind, tmp_path: Path) -> None:
    """Where nothing is packed, what is stored and what was asked for are one form's numbers."""
    described, on_cpu = in_halves(tmp_path, TINY), kind is DeviceKind.CPU
    halves = Life(Weights.BFLOAT16, FloatType.BF16, packed=False, on_load=None)
    whole = Life(Weights.FLOAT32, FloatType.F32, packed=False, on_load=None)
    other = Life(Weights.FLOAT16, FloatType.F16, packed=False, on_load=None)

    assert life_of_load(described, Weights.AUTO, on_cpu=on_cpu) == (whole if on_cpu else halves)
    assert life_of_load(described, Weights.STORED, on_cpu=on_cpu) == halves
    assert life_of_load(described, Weights.BFLOAT16, on_cpu=on_cpu) == halves
    assert life_of_load(described, Weights.FLOAT16, on_cpu=on_cpu) == other


@pytest.mark.parametrize("weights", ON_LOAD)
def test_beside_what_is_packed_a_cpu_has_float32(weights: Weights, tmp_path: Path) -> None:
    """Packed while loading, numbers are float32 on a CPU and as stored elsewhere."""
    described, on_load = in_halves(tmp_path, TINY), ON_LOAD[weights]

    here = Life(weights, FloatType.F32, packed=True, on_load=on_load)
    assert life_of_load(described, weights, on_cpu=True) == here
    assert life_of_load(described, weights, on_cpu=False) == replace(here, form=FloatType.BF16)


def test_what_is_stored_packed_stays_so_where_it_lives_as_stored(tmp_path: Path) -> None:
    """With scales in the form that they are stored in; as numbers nothing is packed."""
    described = describe(write_weights(tmp_path, TINY, stored="4-bit"))
    stored = described.stored

    assert life_of_load(described, Weights.STORED, on_cpu=True) == Life(
        Weights.STORED, stored, packed=True, on_load=None
    )
    assert life_of_load(described, Weights.FLOAT32, on_cpu=True) == Life(
        Weights.FLOAT32, FloatType.F32, packed=False, on_load=None
    )


def test_what_is_stored_packed_is_unpacked_beside_what_a_load_packs(tmp_path: Path) -> None:
    """Where nothing is left to pack, too: a prompt unpacks the layer that is stored so."""
    facts = facts_of(describe(write_weights(tmp_path, TINY, stored="4-bit")))

    assert facts.unpacked_values > 0
    for weights in ON_LOAD:
        assert facts.unpacked_of(weights) == facts.unpacked_values
        assert facts.packed_on_load(weights).values == 0
