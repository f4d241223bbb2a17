"""Who builds what is described: every name has a builder, and a new family is soon added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.family import Family
from mlxd_models.families.common.tensors import Operation, Source, Turn
from mlxd_models.families.foreign import FOREIGN
from mlxd_models.families.registry import REGISTRY
from mlxd_models.fit.described import facts_of
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec
from mlxd_worker.models.loader import builder_of, inspect_model, load_model
from mlxd_worker.models.weights.layouts import OPERATIONS, apply_operation
from mlxd_worker.models.zoo.adapter import ZOO
from tests.support.model_facts import device
from tests.worker.made_up.builder import NarrowedModel
from tests.worker.made_up.narrowed import NARROWED
from tests.worker.tiny import (
    config_with,
    ignore_progress,
    random_weights,
    write_config,
    write_model,
)


@pytest.mark.parametrize("family", [*REGISTRY.values(), ZOO, FOREIGN])
def test_every_described_family_is_built(family: Family[Any]) -> None:
    """The module that a description names is there, and builds models."""
    assert callable(builder_of(family))


def test_a_family_is_added_by_a_description_a_builder_and_a_line(tmp_path: Path) -> None:
    """One file says what it is, one how it is built, one line of a registry that it is there: then
    it is described, planned and loaded, and what is not as described is refused by name."""
    registry = {**REGISTRY, "NarrowedForCausalLM": NARROWED}
    config = config_with(architectures=["NarrowedForCausalLM"], model_type="narrowed", sixths=3)
    weights = random_weights(config_with(hidden_size=32, intermediate_size=24))
    folder = write_model(tmp_path / "narrowed", config, weights)

    described = inspect_model(folder, registry=registry)
    planned = plan_load(facts_of(described), LoadSpec(256, 1), device(1 << 10))
    model = load_model(described, form=FloatType.F32, progress=ignore_progress)
    write_config(folder, {**config, "sixths": 0})
    with pytest.raises(InvalidModel) as refused:
        inspect_model(folder, registry=registry)

    assert type(model) is NarrowedModel
    assert model.vocab_size == config["vocab_size"]
    taken = sum(array.nbytes for array in model.parameters().values())
    assert {term.name: term.nbytes for term in planned.terms}["weights"] == taken
    assert refused.value.field == "sixths"


def test_every_operation_has_a_function() -> None:
    """What a description may name, the worker can do."""
    assert set(OPERATIONS) == set(Operation)


def apply(operation: Operation, stored: mx.array, turn: Turn) -> mx.array:
    """Return what an operation makes of a stored tensor."""
    return apply_operation(Source("stored", tuple(stored.shape), operation, turn=turn), stored)


def test_outputs_in_turns_are_taken_apart() -> None:
    """Every other output is one tensor's, whether outputs are rows, words or the last axis."""
    rows = mx.arange(24).reshape(2, 4, 3)
    block_bytes = mx.arange(2 * 4 * 1 * 8).astype(mx.uint8).reshape(2, 4, 1, 8)
    words = block_bytes.view(mx.uint32).reshape(2, 4, 2)

    for first in (0, 1):
        turn, own = Turn(first, 2), mx.array([first, first + 2])
        assert mx.array_equal(apply(Operation.OUTPUTS, rows, turn), rows[:, own])
        assert mx.array_equal(apply(Operation.OUTPUT_WORDS, block_bytes, turn), words[:, own])
        assert mx.array_equal(
            apply(Operation.LAST_OUTPUTS, rows.swapaxes(1, 2), turn), rows[:, own]
        )


def test_bytes_become_words_and_factors_full_scales() -> None:
    """Four bytes are one word, the lowest first; a factor is of the largest scale and value."""
    turn = Turn()
    stored = mx.array([[1, 0, 0, 0, 0, 1, 0, 0]], dtype=mx.uint8)

    assert apply(Operation.WORDS, stored, turn).tolist() == [[1, 256]]
    assert apply(Operation.FULL_SCALE, mx.array(0.5), turn).item() == 0.5 * 448 * 6
    assert apply(Operation.KEEP, stored, turn) is stored
