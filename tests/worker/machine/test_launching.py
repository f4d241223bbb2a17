"""When kernels are launched by themselves, and who has the last word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_models.families.common.family import Footprint
from mlxd_models.families.registry import REGISTRY, find_family
from mlxd_models.fit.described import Life
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_models.sizes.pass_sizes import PassSizes
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.requests import Weights
from mlxd_worker.machine.launching import (
    GRAPHS_VARIABLE,
    LARGE_NBYTES,
    MANY_ROWS,
    captures_products,
    choose_launching,
)
from mlxd_worker.proof.families import config_of

SMALL = Footprint(
    context_max=8,
    caches=CacheSizes(kv_values_per_token=32, kv_heads=2, head_dim=8),
    passes=PassSizes(hidden=8, projected=16, mlp=10, heads=2, vocab=5),
    plain_matrix=160,
)
HALVES = Life(Weights.BFLOAT16, FloatType.BF16, packed=False, on_load=None)
PLAIN = {
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3VLForConditionalGeneration",
}
"""Families whose layers multiply with plain matrices alone."""


@pytest.mark.parametrize(
    ("weights_nbytes", "rows_max", "alone"),
    [
        (LARGE_NBYTES - 1, MANY_ROWS - 1, False),
        (LARGE_NBYTES, 1, True),
        (1, MANY_ROWS, True),
        (1, 1, False),
    ],
)
def test_large_models_and_many_rows_have_no_graphs(
    weights_nbytes: int, rows_max: int, *, alone: bool
) -> None:
    """MLX reads the variable as a number: 0 is without."""
    environ: dict[str, str] = {}

    choose_launching(environ, weights_nbytes=weights_nbytes, rows_max=rows_max)

    assert environ == {GRAPHS_VARIABLE: "0" if alone else "1"}


@pytest.mark.parametrize(("weights_nbytes", "alone"), [(1, False), (LARGE_NBYTES, True)])
def test_where_all_products_are_nodes_many_rows_have_graphs(
    weights_nbytes: int, *, alone: bool
) -> None:
    """Unless the device takes longer than any host would."""
    environ: dict[str, str] = {}

    choose_launching(environ, weights_nbytes=weights_nbytes, rows_max=MANY_ROWS, captures=False)

    assert environ == {GRAPHS_VARIABLE: "0" if alone else "1"}


@pytest.mark.parametrize("said", ["0", "1"])
def test_what_the_environment_says_stands(said: str) -> None:
    """Whoever runs the worker decides, for whatever model."""
    environ = {GRAPHS_VARIABLE: said}

    for rows_max in (1, MANY_ROWS):
        choose_launching(environ, weights_nbytes=1, rows_max=rows_max)
    assert environ == {GRAPHS_VARIABLE: said}


def test_only_small_plain_matrices_of_halves_are_not_captured() -> None:
    """What a kernel of ours does not multiply, MLX does."""
    assert not captures_products(SMALL, HALVES, own_nbytes_max=2 * 160)
    assert captures_products(SMALL, HALVES, own_nbytes_max=2 * 160 - 1)
    assert captures_products(SMALL, HALVES, own_nbytes_max=0)
    assert captures_products(SMALL, replace(HALVES, packed=True), own_nbytes_max=1000)
    assert captures_products(SMALL, replace(HALVES, form=FloatType.F32), own_nbytes_max=1000)
    assert captures_products(replace(SMALL, plain_matrix=0), HALVES, own_nbytes_max=1000)


@pytest.mark.parametrize("architecture", sorted(REGISTRY))
def test_families_with_other_products_say_so(architecture: str) -> None:
    """Biases, experts, other gates, norms behind a product, recurrences and latents."""
    family = find_family(REGISTRY, architecture)
    footprint = family.footprint(family.parse(config_of(architecture)))

    passes = footprint.passes
    widest = passes.hidden * max(passes.projected, 2 * passes.mlp)
    assert footprint.plain_matrix == (widest if architecture in PLAIN else 0)
