"""Layers of experts by themselves: every way to carry them out, against one dense reckoning."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.families.common.experts import ExpertsConfig
from mlxd_models.families.common.packing import Packing
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.layers.experts import ORDERED_MIN, Experts
from mlxd_worker.models.loader import inspect_model
from mlxd_worker.models.weights.expert_linear import (
    ExpertLinear,
    ExpertProjection,
    PackedExpertLinear,
)
from mlxd_worker.models.weights.linear import Linear
from tests.support.mlx_memory import live_nbytes
from tests.worker.kin import GROUP, QWEN3_MOE, build, kin_weights, quantise, stack_experts
from tests.worker.tiny import difference, load, write_model

COUNT, HIDDEN, MLP = 5, 32, 64
CONFIG = ExpertsConfig(count=COUNT, chosen=2, mlp=MLP, normalised=True, layers=(True,))
PACKING = Packing(group_size=GROUP, bits=8)


def noise(*shape: int, seed: int) -> mx.array:
    """Return random numbers whose rows have a length of about one."""
    drawn: mx.array = mx.random.normal(shape, key=mx.random.key(seed)) / math.sqrt(shape[-1])
    return drawn


def pack_experts(weight: mx.array) -> PackedExpertLinear:
    """Return experts' weights packed."""
    return PackedExpertLinear(*mx.quantize(weight, group_size=GROUP, bits=8), PACKING)


def layer(
    gate_up: ExpertProjection, down: ExpertProjection, *, dtype: mx.Dtype = mx.float32
) -> Experts:
    """Return a layer with these experts."""
    norm = Norm(mx.ones(HIDDEN, dtype=dtype), 1e-6)
    router = Linear((8 * noise(COUNT, HIDDEN, seed=3)).astype(dtype))
    return Experts(CONFIG, norm, router, gate_up, down)


def dense(experts: Experts, rows: mx.array, gate_up: mx.array, down: mx.array) -> mx.array:
    """Return what the layer should: every expert for every row, those not chosen times nothing."""
    normed = mx.fast.rms_norm(rows, None, 1e-6)
    scores = experts.router(normed)
    least = mx.sort(scores, axis=-1)[:, -CONFIG.chosen][:, None]
    shares = mx.softmax(mx.where(scores >= least, scores, -mx.inf), axis=-1)
    both = mx.einsum("mh,eoh->meo", normed, gate_up)
    gate, up = both[..., :MLP], both[..., MLP:]
    outputs = mx.einsum("mei,ehi->meh", gate * mx.sigmoid(gate) * up, down)
    return rows + (shares[..., None] * outputs).sum(axis=1)


@pytest.mark.parametrize("kept", [False, True], ids=["numbers", "packed"])
@pytest.mark.parametrize("count", [1, 2, 3, 40, ORDERED_MIN])
def test_every_way_gives_the_dense_sum(count: int, *, kept: bool) -> None:
    """Gathered row by row, gathered in order or expert by expert: the chosen ones' weighted sum."""
    gate_up, down = noise(COUNT, 2 * MLP, HIDDEN, seed=1), noise(COUNT, HIDDEN, MLP, seed=2)
    experts = layer(pack_experts(gate_up), pack_experts(down)) if kept else layer(
        ExpertLinear(gate_up), ExpertLinear(down)
    )  # fmt: skip
    if kept:
        gate_up, down = (
            mx.dequantize(*mx.quantize(weight, group_size=GROUP, bits=8), group_size=GROUP, bits=8)
            for weight in (gate_up, down)
        )
    rows = noise(count, HIDDEN, seed=4 + count)
    expected = dense(experts, rows, gate_up, down)
    normed = mx.fast.rms_norm(rows, None, 1e-6)
    weights, chosen = experts._choose(normed)

    ways_outputs = [experts._gather(normed, chosen), experts._by_expert(normed, chosen)]
    sums = [rows + (ways * weights[..., None]).sum(axis=1) for ways in ways_outputs]

    for actual in (experts(rows), *sums):
        assert difference(actual, expected) < 1e-5


def test_experts_in_half_precision_keep_their_type() -> None:
    """On a CPU, where no product gathers halves, each expert gets its rows at once."""
    gate_up, down = noise(COUNT, 2 * MLP, HIDDEN, seed=1), noise(COUNT, HIDDEN, MLP, seed=2)
    exact = layer(ExpertLinear(gate_up), ExpertLinear(down))
    rounded = [ExpertLinear(weight.astype(mx.bfloat16)) for weight in (gate_up, down)]
    halves = layer(*rounded, dtype=mx.bfloat16)
    rows = noise(1, HIDDEN, seed=5)

    actual = halves(rows.astype(mx.bfloat16))

    assert actual.dtype == mx.bfloat16
    assert difference(actual.astype(mx.float32), exact(rows)) < 0.02


def test_experts_packed_one_by_one_are_stacked(tmp_path: Path) -> None:
    """A checkpoint that packs each expert's own tensors gives what the stacked one gives."""
    config, stored = quantise(QWEN3_MOE, kin_weights(QWEN3_MOE))
    loose = {}
    for name, array in stored.items():
        if ".switch_mlp." in name:
            for expert in range(array.shape[0]):
                part = name.replace("switch_mlp", f"experts.{expert}")
                loose[part] = mx.contiguous(array[expert])
        else:
            loose[name] = array
    folders = [
        write_model(tmp_path / "a", config, stored),
        write_model(tmp_path / "b", config, loose),
    ]

    for kept in (True, False):
        first, second = (build(folder, packed=kept).parameters() for folder in folders)
        assert first.keys() == second.keys()
        assert all(mx.array_equal(array, second[name]) for name, array in first.items())


def test_experts_packed_unlike_each_other_are_refused(tmp_path: Path) -> None:
    """Two halves of one product in different forms are an error that names the second."""
    config, stored = quantise(QWEN3_MOE, kin_weights(QWEN3_MOE))
    stem = "model.layers.1.mlp.switch_mlp.up_proj"
    plain = stack_experts(kin_weights(QWEN3_MOE))[f"{stem}.weight"]
    loose = {name: array for name, array in stored.items() if not name.startswith(f"{stem}.")}
    folder = write_model(tmp_path, config, loose | {f"{stem}.weight": plain})

    with pytest.raises(InvalidModel) as caught:
        build(folder, packed=True)

    assert caught.value.field == f"{stem}.weight"


@pytest.mark.parametrize("missing", [0, 3])
def test_an_expert_that_is_missing_is_named(missing: int, tmp_path: Path) -> None:
    """Of experts stored one by one all must be there."""
    weights = kin_weights(QWEN3_MOE)
    name = f"model.layers.2.mlp.experts.{missing}.down_proj.weight"
    del weights[name]

    with pytest.raises(InvalidModel) as caught:
        inspect_model(write_model(tmp_path, QWEN3_MOE, weights))

    assert caught.value.field == name


def test_experts_stored_in_both_ways_are_refused(tmp_path: Path) -> None:
    """A stack and a slice of it beside each other: one of them is of no use."""
    weights = stack_experts(kin_weights(QWEN3_MOE))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    weights[name] = mx.zeros((32, 64))

    with pytest.raises(InvalidModel) as caught:
        inspect_model(write_model(tmp_path, QWEN3_MOE, weights))

    assert caught.value.field == name


def test_parameters_are_the_checkpoints_values(tmp_path: Path) -> None:
    """Each array once, experts included: as many values as the fit reckons with."""
    folder = write_model(tmp_path, QWEN3_MOE, kin_weights(QWEN3_MOE))

    held = sum(array.size for array in load(folder).parameters().values())

    assert held == inspect_model(folder).weight_values


@pytest.mark.parametrize("kept", [False, True], ids=["numbers", "packed"])
def test_one_expert_is_read_where_it_lies(*, kept: bool) -> None:
    """A product with one expert's weight takes no copy of it."""
    weight, rows = noise(8, 512, 512, seed=6), noise(2, 512, seed=7)
    stack: ExpertProjection = pack_experts(weight) if kept else ExpertLinear(weight)
    mx.eval(rows, list(stack.arrays().values()))
    one_nbytes = sum(array.nbytes for array in stack.arrays().values()) // 8
    before = live_nbytes()

    mx.eval(stack.of(5)(rows))

    assert mx.get_peak_memory() - before < one_nbytes // 8
