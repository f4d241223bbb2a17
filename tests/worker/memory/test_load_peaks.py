"""What a load takes beyond the finished weights: the largest tensor in both forms, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.packing import ON_LOAD, Packing
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.requests import Weights
from mlxd_worker.machine.lanes import LANES_MAX
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.weights.by_pieces import numbers_of
from mlxd_worker.models.weights.linear import PackedWeight
from tests.support.effort import spread_evenly
from tests.support.mlx_memory import live_nbytes
from tests.worker.hybrid_experts import MOE, NEXT, packed_experts, write_experts
from tests.worker.kin import (
    GPT_OSS,
    QWEN3,
    QWEN3_MOE,
    change,
    kin_weights,
    stack_experts,
    write_kin,
    write_quantised,
)
from tests.worker.latent import DEEPSEEK_V3, packed_latent, write_latent
from tests.worker.models.test_formats import fp8_folders, globally_scaled
from tests.worker.models.test_gpt_oss_layouts import in_numbers, publish
from tests.worker.tiny import ignore_progress, stored_in, write_model

SLACK_NBYTES = 64 << 10
"""Norms, tables and rounding up; of a real model 64 MiB are allowed."""

DENSE = change(QWEN3, num_hidden_layers=2, hidden_size=512, intermediate_size=2048)
EXPERTS = change(QWEN3_MOE, num_hidden_layers=2, hidden_size=512, moe_intermediate_size=256)
OSS = change(GPT_OSS, num_hidden_layers=2, hidden_size=512, intermediate_size=512)
LATENTS = {
    **DEEPSEEK_V3, "kv_lora_rank": 512, "v_head_dim": 256, "qk_nope_head_dim": 256,
}  # fmt: skip
HYBRID = {"hidden_size": 512, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
PACKED_BITS = 4.5
"""Four, and a scale and an offset, or a byte, of each group, or less."""


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and how it is loaded."""

    write: Callable[[Path], Path]
    stored_bits: float = 16
    made_bits: float = 32
    form: FloatType = FloatType.F32
    packed: bool = False
    on_load: Weights | None = None
    values: int = 0
    """Of what is larger while it is loaded than anything that is left of it."""


def halve(folder: Path) -> Path:
    """Store what is float32 in a model of one file as bfloat16."""
    stored = stored_in(folder)
    tensors = {
        name: array.astype(mx.bfloat16) if array.dtype == mx.float32 else array
        for name, array in stored.items()
    }
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def one_by_one(folder: Path) -> Path:
    """Write experts packed each by itself."""
    stored: dict[str, mx.array] = {}
    for name, array in kin_weights(EXPERTS).items():
        stored[name] = array
        if array.ndim == 2:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(array, group_size=64, bits=4)
            stored |= zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True)
    settings = {"group_size": 64, "bits": 4}
    return write_model(folder, {**EXPERTS, "quantization": settings}, stored)


def scaled_experts(folder: Path) -> Path:
    """Write experts in nvfp4 that have scales of their own."""
    stored = dict(weights := stack_experts(kin_weights(EXPERTS)))
    for name, array in weights.items():
        if ".switch_mlp." in name:
            stored |= globally_scaled(name.removesuffix(".weight"), array)
    return write_model(folder, {**EXPERTS, "quantization": NVFP4}, stored)


def in_blocks(config: Mapping[str, Any]) -> Callable[[Path], Path]:
    """Return what writes a model in blocks of 8-bit floats."""
    return lambda folder: fp8_folders(folder, config)[0]


def convert(
    make: Callable[[], tuple[Mapping[str, Any], dict[str, mx.array]]],
) -> Callable[[Path], Path]:
    """Return what writes a model as mlx-lm converts it."""
    return lambda folder: write_model(folder, *make())


KEPT: Mapping[str, Any] = {"packed": True, "stored_bits": PACKED_BITS, "made_bits": PACKED_BITS}
LATENT_VALUES = 4 * (256 + 256) * 512
CASES: Mapping[str, Case] = {
    "dense, as stored": Case(
        lambda folder: halve(write_kin(folder, DENSE)), made_bits=16, form=FloatType.BF16
    ),
    "dense, wider": Case(lambda folder: halve(write_kin(folder, DENSE))),
    "dense, narrower": Case(
        lambda folder: write_kin(folder, DENSE), stored_bits=32, made_bits=16, form=FloatType.F16
    ),
    "dense, unpacked": Case(
        lambda folder: halve(write_quantised(folder, DENSE, group=64)), stored_bits=PACKED_BITS
    ),
    "dense, small floats unpacked": Case(
        lambda folder: halve(write_quantised(folder, DENSE, mode="mxfp4")), stored_bits=PACKED_BITS
    ),
    "dense, packed": Case(lambda folder: halve(write_quantised(folder, DENSE, group=64)), **KEPT),
    "dense, packed on load": Case(
        lambda folder: halve(write_kin(folder, DENSE)), packed=True, on_load=Weights.Q4,
        made_bits=PACKED_BITS,
    ),
    "dense, in blocks": Case(in_blocks(DENSE), stored_bits=8),
    "experts one by one, wider": Case(lambda folder: halve(write_kin(folder, EXPERTS))),
    "experts one by one, narrower": Case(
        lambda folder: write_kin(folder, EXPERTS), stored_bits=32, made_bits=16, form=FloatType.BF16
    ),
    "experts one by one, packed": Case(lambda folder: halve(one_by_one(folder)), **KEPT),
    "experts one by one, unpacked": Case(
        lambda folder: halve(one_by_one(folder)), stored_bits=PACKED_BITS
    ),
    "experts stacked, unpacked": Case(
        lambda folder: halve(write_quantised(folder, EXPERTS, group=64)), stored_bits=PACKED_BITS
    ),
    "experts one by one, packed on load": Case(
        lambda folder: halve(write_kin(folder, EXPERTS)), packed=True, on_load=Weights.MXFP4,
        made_bits=PACKED_BITS,
    ),
    "experts with scales of their own, unpacked": Case(scaled_experts, stored_bits=PACKED_BITS),
    "experts one by one, in blocks": Case(in_blocks(EXPERTS), stored_bits=8),
    "experts fused": Case(
        lambda folder: halve(write_experts(folder, {**MOE, **HYBRID, "moe_intermediate_size": 256}))
    ),
    "gpt-oss as published, packed": Case(lambda folder: halve(publish(folder, OSS)), **KEPT),
    "gpt-oss as published, unpacked": Case(
        lambda folder: halve(publish(folder, OSS)), stored_bits=PACKED_BITS
    ),
    "gpt-oss in numbers": Case(lambda folder: halve(in_numbers(folder, OSS))),
    "gpt-oss in numbers, as stored": Case(
        lambda folder: halve(in_numbers(folder, OSS)), made_bits=16, form=FloatType.BF16
    ),
    "gpt-oss in numbers, packed on load": Case(
        lambda folder: halve(in_numbers(folder, OSS)), packed=True, on_load=Weights.MXFP4,
        made_bits=PACKED_BITS,
    ),
    "gpt-oss apart": Case(lambda folder: halve(write_kin(folder, OSS))),
    "gpt-oss apart, packed": Case(
        lambda folder: halve(write_quantised(folder, OSS, mode="mxfp4")), **KEPT
    ),
    "latents": Case(lambda folder: halve(write_latent(folder, LATENTS)), values=LATENT_VALUES),
    "latents, packed": Case(
        lambda folder: halve(convert(lambda: packed_latent(LATENTS, group=64))(folder)), **KEPT
    ),
    "hybrid, in order": Case(lambda folder: halve(write_experts(folder, {**NEXT, **HYBRID}))),
    "hybrid, in order, packed": Case(
        lambda folder: halve(convert(lambda: packed_experts({**NEXT, **HYBRID}, group=64))(folder)),
        **KEPT,
    ),
}  # fmt: skip


def largest_values(model: Model) -> int:
    """Return how many values the largest weight has, packed in 4 bits or not."""
    return max(
        array.size * (8 if array.dtype == mx.uint32 else 1) for array in model.parameters().values()
    )


def check_peak(name: str, folder: Path) -> None:
    """Load one of the cases, and compare what it took with what it may take."""
    case = CASES[name]
    files = inspect_model(case.write(folder))
    mx.clear_cache()
    before = live_nbytes()

    model = load_model(
        files,
        form=case.form,
        progress=ignore_progress,
        packed=case.packed,
        on_load=None if case.on_load is None else ON_LOAD[case.on_load],
    )

    peak_nbytes = mx.get_peak_memory() - before
    finished = sum(array.nbytes for array in model.parameters().values())
    values = max(case.values, largest_values(model))
    both_nbytes = values * (case.stored_bits + case.made_bits) / 8
    assert peak_nbytes <= finished + both_nbytes + SLACK_NBYTES, (
        f"{(peak_nbytes - finished) / both_nbytes:.2f} of the largest in both forms"
    )
    assert abs(mx.get_active_memory() - before - finished) < SLACK_NBYTES


@pytest.mark.parametrize("name", spread_evenly(list(CASES), 14))
def test_a_load_takes_the_largest_tensor_in_both_forms_besides(name: str, tmp_path: Path) -> None:
    """Whatever is joined, stacked, taken apart, put in order, widened, packed or unpacked: at no
    moment is more there than the finished weights and the largest as stored and as made."""
    check_peak(name, tmp_path)


def unpacking_nbytes(streams: int) -> int:
    """Return what it takes to unpack a weight on so many streams, beside its two forms."""
    rows, inputs, packing = 4096, 1024, Packing(64, 8)
    words, scales, offsets = mx.quantize(mx.random.normal((rows, inputs)), bits=8)
    mx.eval(words, scales, offsets)
    before = live_nbytes()
    numbers = numbers_of(
        PackedWeight(words, scales, offsets, packing),
        exact_in=mx.float32,
        dtype=mx.bfloat16,
        streams=[mx.new_stream(mx.cpu) for _ in range(streams)],
    )
    return mx.get_peak_memory() - before - numbers.nbytes


def test_more_cores_take_no_more_memory() -> None:
    """Weights are unpacked side by side; what that takes is bounded for all cores together."""
    assert unpacking_nbytes(streams=LANES_MAX) <= unpacking_nbytes(streams=2) + SLACK_NBYTES
