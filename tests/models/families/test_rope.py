"""Rotary scaling: by how much each kind slows which rotations, and what it multiplies by."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxd_models.families.common.rope import Llama3Scaling, RopeConfig
from mlxd_models.families.gemma3 import parse_gemma3
from mlxd_models.families.llama import parse_llama
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.proof.families import config_of
from tests.worker.tiny import config_with

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def test_llama3_stretches_slow_rotations_only() -> None:
    """Short waves stay, long waves slow by the factor, and between them the blend is monotone."""
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    waves = [10.0, 2048.0, 3000.0, 5000.0, 8192.0, 100000.0]

    stretches = [scaling.stretch(wave) for wave in waves]

    assert (stretches[0], stretches[1], stretches[-2], stretches[-1]) == (1.0, 1.0, 8.0, 8.0)
    assert stretches == sorted(stretches)


@pytest.mark.parametrize(
    ("changes", "gain"),
    [
        ({}, 1 + math.log(4) / 10),
        ({"attention_factor": 1.5, "mscale": 2, "mscale_all_dim": 1}, 1.5),
        ({"mscale": 2, "mscale_all_dim": 1}, (10 + 2 * math.log(4)) / (10 + math.log(4))),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2}, 1 + math.log(4) / 10),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarns_gain_is_stated_or_follows(changes: dict[str, Any], gain: float) -> None:
    """The gain is `attention_factor`; else of both weights, where both are; else of the factor."""
    config = parse_llama(config_with(rope_scaling={**YARN, **changes}))

    assert config.rope.gain == pytest.approx(gain)


def test_yarn_slows_rare_rotations_only() -> None:
    """Fast pairs stay, slow ones slow by the factor; not truncated, the blend moves a little."""
    ropes = [
        parse_llama(config_with(rope_scaling={**YARN, "truncate": truncate})).rope
        for truncate in (True, False)
    ]
    plain = [10000.0 ** (pair / 64) for pair in range(64)]

    whole, exact = (
        [got / base for got, base in zip(rope.periods(128) or [], plain, strict=True)]
        for rope in ropes
    )

    assert whole[:20] == pytest.approx([1.0] * 20)
    assert whole[-15:] == pytest.approx([4.0] * 15)
    assert whole == sorted(whole)
    assert 1e-3 < max(abs(a - b) for a, b in zip(whole, exact, strict=True)) < 0.5


def test_dynamic_scaling_leaves_positions_within_the_context() -> None:
    """It acts only beyond `max_position_embeddings`, where no row ever is."""
    config = parse_llama(config_with(rope_scaling={"type": "dynamic", "factor": 2.0}))

    assert config.rope == RopeConfig(base=10000.0)


LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_scaling": {**YARN, "beta_fast": 1e308}}, "rope_scaling"),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 5e-324}}, "rope_scaling"),
        ({"rope_scaling": {**YARN, "mscale": 1e308, "mscale_all_dim": 1e-308}}, "rope_scaling"),
        ({"rope_parameters": {**YARN, "factor": 1e308}}, "rope_parameters"),
        (
            {"rope_scaling": {
                **LLAMA3, "factor": 1e300, "low_freq_factor": 1e3, "high_freq_factor": 4e3,
            }},
            "rope_scaling",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 5e-324}}, "rope_scaling"),
        ({"rope_theta": 5e-324}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_rotation_are_refused(rope: dict[str, Any], key: str) -> None:
    """Before a load builds with them, by their key: also for layers that slide, where some do."""
    with pytest.raises(InvalidModel) as caught:
        parse_llama(config_with(**rope))
    assert (caught.value.file, caught.value.field) == ("config.json", key)

    with pytest.raises(InvalidModel):
        parse_gemma3({**config_of("Gemma3ForCausalLM"), **rope})
