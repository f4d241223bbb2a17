"""Families with sliding and whole layers: which caches they have, of what type, how exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import Kind
from tests.worker.hybrid import error, token_ids
from tests.worker.kin import GEMMA3, GPT_OSS, ROWS, all_logits, change, write_kin
from tests.worker.tiny import caches_of, forced_logits, load

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma 3": change(GEMMA3),
    # All experts are chosen: which two are best may depend on the rounding.
    "gpt-oss": change(GPT_OSS, num_experts_per_tok=6),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_layer_gets_the_cache_of_its_kind(name: str, tmp_path: Path) -> None:
    """Sliding layers rotate, whole ones keep all, quantised where that is asked for."""
    model = load(write_kin(tmp_path, CONFIGS[name]))

    for kv, whole in ((KVFormat.MODEL, Kind.STANDARD), (KVFormat.Q8, Kind.QUANTIZED)):
        kinds = [None if cache is None else cache.kind for cache in model.new_caches(kv=kv)]
        assert kinds == [Kind.ROTATING, whole, Kind.ROTATING, whole]


@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_keys_and_values_stay_near(name: str, tmp_path: Path) -> None:
    """With the whole layers' keys and values in 8 bits logits stay near the exact ones."""
    folder = write_kin(tmp_path, CONFIGS[name])
    tokens = token_ids(100, seed=3)

    exact, near = (all_logits(load(folder), tokens, kv=kv) for kv in (KVFormat.MODEL, KVFormat.Q8))

    assert 0 < error(near, exact) < 0.05


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", [FloatType.BF16, FloatType.F16])
def test_half_precision_runs_end_to_end(name: str, form: FloatType, tmp_path: Path) -> None:
    """Weights in half precision give rows and caches of that type, and logits near float32's."""
    folder = write_kin(tmp_path, CONFIGS[name])
    tokens = token_ids(60, seed=7)
    exact = all_logits(load(folder), tokens)
    model = load(folder, form)
    caches = caches_of(model)

    logits = forced_logits(model, caches, ROWS[0], tokens, cuts=[30, 31])

    assert {array.dtype for array in caches.state()} == {model.dtype}
    assert error(logits, exact) < 0.2
