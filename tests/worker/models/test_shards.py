"""Ranks of one model: their parts are the whole's tensors, bit for bit, what they compute is the
whole's, and each holds what its plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.fit.described import facts_of, life_of
from mlxd_models.fit.plan import POOL_TERM, WEIGHTS_TERM
from mlxd_models.fit.planner import plan_load
from mlxd_models.fit.shares import check_divides, rank_description
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.mlx_memory import live_nbytes
from tests.support.model_facts import device
from tests.worker.hybrid import TOLERANCE, error, token_ids
from tests.worker.kin import (
    GEMMA3,
    GPT_OSS,
    QWEN3,
    QWEN3_MOE,
    change,
    kin_weights,
    write_kin,
    write_quantised,
)
from tests.worker.models.test_formats import fp8_folders
from tests.worker.models.test_gpt_oss_layouts import in_numbers, publish
from tests.worker.shares import Sums, load_ranks, logits_together, put_together
from tests.worker.tiny import caches_of, forced_logits, ignore_progress, write_model

WIDTHS: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 256,
}  # fmt: skip
"""Whole groups of 64 values on each of four ranks."""
DENSE = change(QWEN3, **WIDTHS)
LLAMA = change(
    DENSE, architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=True,
    mlp_bias=True, tie_word_embeddings=True,
)  # fmt: skip
QWEN2 = change(DENSE, architectures=["Qwen2ForCausalLM"], model_type="qwen2")
MOE = change(QWEN3_MOE, **WIDTHS, moe_intermediate_size=256, num_experts=4, mlp_only_layers=[1])
SINKS = change(GPT_OSS, **WIDTHS, num_local_experts=4)
GEMMA = change(GEMMA3, **WIDTHS)
SQUARES = {"head_dim": 240, "intermediate_size": 960, "moe_intermediate_size": 960}
"""Whole squares, of the size that `fp8_folders` has, on each of four ranks."""

Write = Callable[[Path, Mapping[str, Any]], Path]


def write_halves(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model as published, in bfloat16."""
    stored = {name: array.astype(mx.bfloat16) for name, array in kin_weights(config).items()}
    return write_model(folder, config, stored)


def write_squares(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model in squares of 8-bit floats."""
    return fp8_folders(folder, config)[0]


@dataclass(frozen=True)
class Case:
    """A model as it is stored, and how it lives."""

    config: Mapping[str, Any]
    write: Write
    weights: Weights = Weights.STORED
    kind: DeviceKind = DeviceKind.CPU
    tolerance: float = TOLERANCE


AFFINE4: Write = partial(write_quantised, bits=4, group=64)
AFFINE8: Write = partial(write_quantised, bits=8, group=32)
MXFP4: Write = partial(write_quantised, bits=4, mode="mxfp4", group=32)
CASES = {
    "llama": Case(LLAMA, write_kin),
    "llama in halves": Case(LLAMA, write_halves, kind=DeviceKind.CUDA, tolerance=0.06),
    "llama, halves widened": Case(LLAMA, write_halves, Weights.FLOAT32),
    "llama in 4 bits": Case(LLAMA, AFFINE4),
    "llama packed on loading": Case(LLAMA, write_halves, Weights.Q4),
    "qwen2 in 8 bits": Case(QWEN2, AFFINE8),
    "qwen2 packed on loading": Case(QWEN2, write_kin, Weights.MXFP8),
    "qwen3 in squares": Case(change(DENSE, **SQUARES), write_squares),
    "qwen3 in 4 bits": Case(DENSE, AFFINE4),
    "qwen3, 4 bits unpacked": Case(DENSE, AFFINE4, Weights.FLOAT32),
    "qwen3 mixed on loading": Case(DENSE, write_kin, Weights.MIXED_4_8),
    "gemma": Case(GEMMA, write_kin),
    "gemma in 4 bits": Case(GEMMA, AFFINE4),
    "experts": Case(MOE, write_kin),
    "experts in halves": Case(MOE, write_halves, kind=DeviceKind.CUDA, tolerance=0.06),
    "experts in 4 bits": Case(MOE, AFFINE4),
    "experts in 8 bits": Case(MOE, AFFINE8),
    "experts, 4 bits unpacked": Case(MOE, AFFINE4, Weights.FLOAT32),
    "experts packed on loading": Case(MOE, write_halves, Weights.NVFP4),
    "experts in squares": Case(change(MOE, **SQUARES), write_squares),
    "sinks in blocks": Case(SINKS, publish),
    "sinks in turns": Case(SINKS, in_numbers),
    "sinks in mxfp4": Case(SINKS, MXFP4),
    "sinks packed on loading": Case(SINKS, in_numbers, Weights.Q8),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_are_the_whole(case: Case, ranks: int, tmp_path: Path) -> None:
    """Put together their tensors are the whole's; so are their logits, but for rounding, and the
    ranks' own are one another's; and each holds, to the byte, what the fit says a rank does.
    """
    files = inspect_model(case.write(tmp_path / "model", case.config))
    spec = LoadSpec(weights=case.weights)
    check_divides(files, spec, ranks)
    part = rank_description(files, ranks)
    plan = plan_load(facts_of(part), spec, device(1 << 20, kind=case.kind))
    life = life_of(plan, files, on_cpu=case.kind is DeviceKind.CPU)
    whole = load_model(
        files, form=life.form, progress=ignore_progress, packed=life.packed, on_load=life.on_load
    )
    sums = Sums()
    models = load_ranks(
        files, ranks, sums.add, form=life.form, packed=life.packed, on_load=life.on_load
    )

    expected = whole.parameters()
    held = [model.parameters() for model in models]
    together = put_together(files.config, held, expected)
    for name, array in expected.items():
        assert together[name].dtype == array.dtype, name
        assert mx.array_equal(together[name], array), name

    tokens = token_ids(24, seed=3)
    alone = forced_logits(whole, caches_of(whole), RowId(1), tokens, cuts=[])
    logits = logits_together(models, tokens, sums)
    assert all(mx.array_equal(each, logits[0]) for each in logits)
    assert error(logits[0], alone) < case.tolerance

    for model, arrays in zip(models, held, strict=True):
        nbytes = sum(array.nbytes for name, array in arrays.items() if "rope" not in name)
        assert nbytes == plan.nbytes_of(WEIGHTS_TERM)
        kept = [layer for layer in model.attention if layer is not None]
        caches = facts_of(part).caches
        values = sum(2 * its.kv_heads * its.head_dim for its in kept)
        windowed = sum(layers.kv_values_per_token for layers in caches.windows)
        assert values == caches.kv_values_per_token + windowed


def test_a_ranks_load_needs_little_besides(tmp_path: Path) -> None:
    """No tensor is there whole, not even one in short stripes: each ends where it is read."""
    files = inspect_model(write_kin(tmp_path, change(LLAMA, intermediate_size=8192)))
    before = live_nbytes()

    (model, *_) = load_ranks(files, 2, Sums().add, form=files.stored)

    finished = sum(array.nbytes for array in model.parameters().values())
    assert mx.get_peak_memory() - before <= 2 * finished + (16 << 10)


@pytest.mark.parametrize("config", [DENSE, MOE, SINKS], ids=["dense", "experts", "sinks"])
def test_a_ranks_pass_takes_what_is_planned(config: Mapping[str, Any], tmp_path: Path) -> None:
    """A prompt of two chunks, kept to the rank's plan as a worker keeps it: within it, and not by
    much.
    """
    wide = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512}
    files = inspect_model(write_kin(tmp_path, change(config, **wide)))
    part = rank_description(files, 4)
    spec = LoadSpec(rows_max=1, context_length=1024, weights=Weights.FLOAT32)
    plan = plan_load(facts_of(part), spec, device(1 << 20))
    planned = plan.arrays_bytes - plan.nbytes_of(POOL_TERM)
    sizes = part.footprint
    beyond = sizes.passes.beyond_nbytes(sizes.caches, context=1024, item_nbytes=4)
    before = live_nbytes()
    (model, *others) = load_ranks(files, 4, lambda partial: partial, form=FloatType.F32)
    del others
    caches = RowCaches(model.new_caches(context_max=1024), context_max=1024, rows_max=1)
    caches.join(RowId(1), tokens=1024)
    live_nbytes()
    limit = mx.set_memory_limit(planned - beyond + before)
    try:
        for first in (0, 512):
            model.forward(Batch.prefill(token_ids(512, seed=first), first, RowId(1)), caches)
            mx.eval(caches.state())
    finally:
        mx.set_memory_limit(limit)
    assert 0.6 * planned < mx.get_peak_memory() - before <= planned
