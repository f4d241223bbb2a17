"""A weight's transpose, made once where the weight stays, and not by every pass."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.models.layers.llama_layers import Dense
from mlxd_worker.models.weights.linear import Linear, reorder_outputs
from tests.support.mlx_memory import live_nbytes
from tests.worker.tiny import config_with, load, random_weights, write_model


def test_a_weight_that_stays_is_turned_once() -> None:
    """Its products are the same to the bit; the turned view is nobody's array but the weight's."""
    keys = mx.random.split(mx.random.key(1), 3)
    weight, bias, rows = (
        mx.random.normal(shape, key=key)
        for shape, key in zip([(24, 16), (24,), (5, 16)], keys, strict=True)
    )
    mx.eval(weight, bias, rows)
    before_nbytes = live_nbytes()
    kept = Linear(weight).turn_once()
    assert live_nbytes() == before_nbytes, "a view"
    assert kept.across.shape == (16, 24)
    for given_bias in (None, bias):
        plain, turned = Linear(weight, given_bias), Linear(weight, given_bias).turn_once()
        assert mx.array_equal(plain(rows), turned(rows)).item()
        assert turned.across is turned.across
        assert plain.across is not plain.across
        assert turned.arrays().keys() == plain.arrays().keys()
    reordered = reorder_outputs(Linear(weight).turn_once(), [range(23, -1, -1)])
    assert isinstance(reordered, Linear)
    assert reordered.across is reordered.across
    assert mx.array_equal(reordered(rows), (rows @ weight.T)[:, ::-1]).item()


def test_loaded_weights_are_turned_once(tmp_path: Path) -> None:
    """So a pass has an operation less for each product."""
    config = config_with(attention_bias=True)
    model = load(write_model(tmp_path, config, random_weights(config)))
    assert isinstance(model, LlamaModel)

    for layer in model._layers:
        assert isinstance(layer.feed, Dense)
        for projection in (layer.qkv, layer.output, layer.feed.gate_up, layer.feed.down):
            assert isinstance(projection, Linear)
            assert projection.across is projection.across
