"""Kinds of rope scaling: at positions within the original context and beyond, whoever is there."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_models.families.common.rope import LongScaling, RopeConfig
from mlxd_models.families.gemma3 import parse_gemma3
from mlxd_models.families.gpt_oss import parse_gpt_oss
from mlxd_models.families.hybrid.qwen3_5_moe import parse_qwen3_5_moe
from mlxd_models.families.latent.glm4_moe_lite import parse_glm4_moe_lite
from mlxd_models.families.llama import parse_llama
from mlxd_models.families.mistral import parse_mistral
from mlxd_models.families.qwen2 import parse_qwen2
from mlxd_models.families.qwen3 import parse_qwen3
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.thread.facts import LoadJob
from mlxd_worker.thread.resident import make_resident
from tests.support.tiny_model import write_tiny_model
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.hybrid_experts import MOE
from tests.worker.kin import (
    GEMMA3,
    GPT_OSS,
    QWEN3,
    ROWS,
    all_logits,
    build,
    change,
    parse_folder,
    worst_ragged,
    write_kin,
)
from tests.worker.latent import GLM4
from tests.worker.tiny import caches_of, config_with, forced_logits, ignore_progress

ORIGINAL, CONTEXT, PAIRS = 64, 1024, 16
SHORT = [1.0 + 0.05 * pair for pair in range(PAIRS)]
LONG = [1.5 + 0.4 * pair for pair in range(PAIRS)]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": CONTEXT / ORIGINAL,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": SHORT,
    "long_factor": LONG,
}
GAIN = math.sqrt(1 + math.log(CONTEXT / ORIGINAL) / math.log(ORIGINAL))


def write_qwen3(folder: Path, **changes: Any) -> Path:
    """Write a Qwen3 that rotates by factors of single pairs."""
    return write_kin(folder, change(QWEN3, rope_scaling={**LONGROPE, **changes}))


def load_for(folder: Path, context: int | None) -> Model:
    """Return a model no row of which outgrows `context`."""
    files = inspect_model(folder)
    return load_model(files, form=FloatType.F32, progress=ignore_progress, context=context)


def told_logits(
    folder: Path, tokens: Sequence[int], *, factors: Sequence[float], gain: float
) -> mx.array:
    """Return mlx-lm's logits with these factors and this gain: transformers' formula."""
    peer, _ = load_peer(folder)
    plain = 10000.0 ** (mx.arange(0, 2 * PAIRS, 2) / (2 * PAIRS))
    for layer in peer.layers:
        layer.self_attn.rope._freqs = mx.array(list(factors)) * plain
        layer.self_attn.rope._scale = gain
    logits: mx.array = peer(mx.array([list(tokens)]), cache=make_prompt_cache(peer))[0]
    return logits


def test_a_long_context_is_the_peers_within_the_original_one_and_beyond(tmp_path: Path) -> None:
    """Where rows may outgrow the original context all rotate by the long factors."""
    folder = write_qwen3(tmp_path)
    tokens = token_ids(150, seed=1)

    assert (
        error(all_logits(load_for(folder, CONTEXT), tokens), peer_logits(folder, tokens))
        < TOLERANCE
    )
    assert worst_ragged(load_for(folder, None), folder, [3, 58, 200, 75]) < TOLERANCE


def test_a_short_context_rotates_by_the_short_factors(tmp_path: Path) -> None:
    """Where no row outgrows the original context all are as transformers has short texts."""
    folder = write_qwen3(tmp_path)
    tokens = token_ids(ORIGINAL, seed=2)
    expected = told_logits(folder, tokens, factors=SHORT, gain=GAIN)

    assert error(all_logits(load_for(folder, ORIGINAL), tokens), expected) < TOLERANCE
    assert error(all_logits(load_for(folder, ORIGINAL + 1), tokens), expected) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("changes", "gain"),
    [({"attention_factor": 1.7}, 1.7), ({"factor": 0.5}, 1.0), ({"factor": 4.0}, math.sqrt(4 / 3))],
)
def test_the_gain_is_stated_or_follows_from_the_factor(
    changes: dict[str, Any], gain: float, tmp_path: Path
) -> None:
    """`attention_factor`, else the root of one and how the factor grows; mlx-lm ignores both."""
    folder = write_qwen3(tmp_path, **changes)
    tokens = token_ids(90, seed=3)
    expected = told_logits(folder, tokens, factors=LONG, gain=gain)

    assert error(all_logits(load_for(folder, None), tokens), expected) < TOLERANCE
    assert error(peer_logits(folder, tokens), expected) > 10 * TOLERANCE


Mutation = Callable[[RopeConfig], RopeConfig]


def long_with(**changes: Any) -> Mutation:
    """Return a change of the scaling."""

    def changed_rope(rope: RopeConfig) -> RopeConfig:
        assert isinstance(rope.scaling, LongScaling)
        return replace(rope, scaling=replace(rope.scaling, **changes))

    return changed_rope


MUTATIONS: dict[str, Mutation] = {
    "no scaling": lambda rope: replace(rope, scaling=None),
    "no gain": long_with(gain=1.0),
    "the short factors": long_with(context=ORIGINAL),
    "one factor for all": long_with(long=(4.0,) * PAIRS),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    folder = write_qwen3(tmp_path)
    tokens = token_ids(130, seed=4)
    model = build(folder, rope=MUTATIONS[name](parse_folder(folder).rope))

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_keys_of_a_short_row_serve_it_when_it_is_long(tmp_path: Path) -> None:
    """Keys kept while a row was within the original context are what one pass over all makes."""
    model = load_for(write_qwen3(tmp_path), None)
    tokens = token_ids(2 * ORIGINAL, seed=5)
    cuts = [ORIGINAL // 2, *range(ORIGINAL - 2, ORIGINAL + 3)]

    piece_by_piece, whole = (
        forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=its) for its in (cuts, [])
    )

    assert error(piece_by_piece, whole) < TOLERANCE


def test_dynamic_scaling_is_the_peers_up_to_the_context(tmp_path: Path) -> None:
    """It acts beyond `max_position_embeddings`, and no row may get there: both sides say so."""
    scaling = {"type": "dynamic", "factor": 4.0}
    config = change(QWEN3, rope_scaling=scaling, max_position_embeddings=128)
    folder = write_kin(tmp_path, config)
    tokens = token_ids(128, seed=6)

    model = load_for(folder, None)

    assert model.context_max == 128
    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE


@pytest.fixture
def limits() -> Iterator[None]:
    """Put MLX's own limits back, which a load sets."""
    pool = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(pool)
    memory = mx.get_memory_limit()
    yield
    mx.set_cache_limit(pool)
    mx.set_memory_limit(memory)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("context", "factors"), [(ORIGINAL, SHORT), (ORIGINAL + 1, LONG)])
def test_a_load_rotates_by_the_context_that_it_is_given(
    context: int, factors: list[float], tmp_path: Path
) -> None:
    """The context of a load says whether its rows are short ones."""
    folder = write_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    own = {"short_factor": SHORT[:pairs], "long_factor": LONG[:pairs], "factor": 2.0}
    scaling = {key: value for key, value in {**LONGROPE, **own}.items() if key != "rope_type"}
    changes = {"rope_scaling": {"type": "longrope", **scaling}, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config | changes))
    kind = choose_backend(installed_versions(), platform=sys.platform).kind
    job = LoadJob(folder, "tiny", "d" * 64, LoadSpec(rows_max=1, context_length=context))

    resident = make_resident(job, device=kind, report=lambda _: None)

    plain = 10000.0 ** (mx.arange(0, 2 * pairs, 2) / (2 * pairs))
    table = resident.model.parameters()["rope_periods"]
    assert mx.allclose(table, mx.array(factors[:pairs]) * plain, rtol=1e-5)


Parse = Callable[[Mapping[str, Any]], object]
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
BESIDE = "original_max_position_embeddings"
REFUSED: dict[str, tuple[Parse, Mapping[str, Any], str, str]] = {
    "a factor short": (
        parse_qwen3,
        change(QWEN3, rope_scaling={**LONGROPE, "short_factor": SHORT[1:]}),
        "rope_scaling.short_factor", "15 factors, 32 values",
    ),
    "a factor too many": (
        parse_qwen3,
        change(QWEN3, rope_scaling={**LONGROPE, "long_factor": [*LONG, 1.0]}),
        "rope_scaling.long_factor", "17 factors",
    ),
    "no long factors": (
        parse_qwen3,
        change(QWEN3, rope_scaling={**LONGROPE, "long_factor": None}),
        "rope_scaling.long_factor", "not a list",
    ),
    "a factor of nothing": (
        parse_qwen3,
        change(QWEN3, rope_scaling={**LONGROPE, "short_factor": [0.0, *SHORT[1:]]}),
        "rope_scaling.short_factor.0", "above 0",
    ),
    "no original context": (
        parse_qwen3, change(QWEN3, rope_scaling={**LONGROPE, BESIDE: None}),
        f"rope_scaling.{BESIDE}", "missing",
    ),
    "two original contexts": (
        parse_qwen3, change(QWEN3, rope_scaling=LONGROPE, original_max_position_embeddings=32),
        f"rope_scaling.{BESIDE}", "64 contradicts 32",
    ),
    "a scale for each list": (
        parse_qwen3, change(QWEN3, rope_scaling={**LONGROPE, "long_mscale": 1.2}),
        "rope_scaling.long_mscale", "readers differ",
    ),
    "two kinds": (
        parse_llama, config_with(rope_scaling={"type": "linear", "rope_type": "dynamic"}),
        "rope_scaling.type", "contradicts rope_type",
    ),
    "rotations by kind of layer": (
        parse_llama, config_with(rope_parameters=NESTED),
        "rope_parameters.full_attention", "not supported",
    ),
    "part of a head by factors": (
        parse_qwen3_5_moe, change(MOE, rope_parameters={**LONGROPE, "rope_theta": 1e4}),
        "rope_parameters.rope_type", "'longrope'",
    ),
    "a Gemma by factors": (
        parse_gemma3, change(GEMMA3, rope_scaling=LONGROPE),
        "rope_scaling.rope_type", "'longrope'",
    ),
    "a window unsaid": (
        parse_mistral, config_with(max_position_embeddings=8192), "sliding_window", "missing",
    ),
    "a window of null": (
        parse_qwen2,
        {**config_with(use_sliding_window=True, max_window_layers=0), "sliding_window": None},
        "sliding_window", "null",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    """What readers differ about, or the model does not do, is named."""
    parse, config, field, words = REFUSED[name]

    with pytest.raises(InvalidModel) as caught:
        parse(config)

    assert caught.value.field == field
    assert words in caught.value.problem


@pytest.mark.parametrize("kind", ["longrope", "yarn", "llama3"])
def test_an_original_context_beside_the_scaling_counts(kind: str) -> None:
    """It may stand beside the scaling, where transformers looks first."""
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    within = {**LONGROPE, **more, "rope_type": kind}
    beside = {key: value for key, value in within.items() if key != BESIDE}

    older = parse_qwen3(change(QWEN3, rope_scaling=within))
    newer = parse_qwen3(change(QWEN3, rope_scaling=beside, **{BESIDE: ORIGINAL}))

    assert newer == older


def test_norms_without_epsilon_have_the_familys() -> None:
    """Those whose default is not everybody's have their own."""
    assert parse_gpt_oss(change(GPT_OSS, rms_norm_eps=None)).norm_eps == 1e-5
    assert parse_glm4_moe_lite(change(GLM4, rms_norm_eps=None)).decoder.norm_eps == 1e-5


def test_a_window_that_no_row_outgrows_may_be_left_out() -> None:
    """Within the default window all readings of a Mistral are the same."""
    assert parse_mistral(config_with(max_position_embeddings=4096)).windows == (None, None)
