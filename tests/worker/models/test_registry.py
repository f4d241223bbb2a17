"""Who builds what is described: every name has a builder, and a new family is soon added."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlxd_models.families.common.decoder import llama_tensors
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.footprint import llama_footprint
from mlxd_models.families.common.tensors import Operation, Source, Turn
from mlxd_models.families.llama import parse_llama
from mlxd_models.families.registry import REGISTRY, Registry
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.registry import BUILDERS
from mlxd_worker.models.weights.operations import OPERATIONS, apply_operation
from mlxd_worker.models.zoo.adapter import ZOO
from tests.worker.tiny import config_with, ignore_progress, random_weights, write_model


def test_every_described_family_is_built_and_no_other() -> None:
    """The names that descriptions have for builders are those that the worker has."""
    described = {family.builder for family in REGISTRY.entries.values()}

    assert set(BUILDERS) == described | {ZOO.builder}


class MadeUpModel(LlamaModel):
    """A family that is nobody's."""


def test_a_family_is_added_by_a_description_a_builder_and_a_line(tmp_path: Path) -> None:
    """Neither the reading of files nor the load knows families by name."""
    family = Family("made up", parse_llama, llama_tensors, llama_footprint)
    registry = Registry(*REGISTRY.entries.items(), ("MadeUpForCausalLM", family))
    config = config_with(architectures=["MadeUpForCausalLM"])
    folder = write_model(tmp_path, config, random_weights(config_with()))

    model = load_model(
        inspect_model(folder, registry=registry),
        form=FloatType.F32,
        progress=ignore_progress,
        builders={**BUILDERS, "made up": MadeUpModel},
    )

    assert type(model) is MadeUpModel
    assert model.vocab_size == config["vocab_size"]


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
