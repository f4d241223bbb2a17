"""Models through mlx-lm: logits by our caches are its own, or it is refused by name."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest

from mlxd_models.describe import describe
from mlxd_models.families.foreign import FOREIGN, MLX_LM
from mlxd_models.families.foreign_parts import check_installed
from mlxd_models.families.registry import REGISTRY
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_models.sizes.zoo_sizes import DEFAULTS_FILE, zoo_cache_sizes, zoo_context
from mlxd_models.sizes.zoo_types import (
    ZOO_EXTRA,
    ZOO_TYPES,
    ZOO_VERSION,
    zoo_type,
)
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.zoo.adapter import ZooModel, parse_zoo, zoo_footprint
from tests.support.effort import IN_CI, IN_SOAK
from tests.worker.hybrid import error, token_ids
from tests.worker.kin import ROWS, quantise
from tests.worker.tiny import ignore_progress, load, write_config, write_model
from tests.worker.zoo import (
    APART,
    CONFIGS,
    OTHERS,
    PARITY,
    REFUSED,
    UNTRIED,
    Peer,
    inspect_folder,
    prefilled_error,
    ragged_error,
    write_zoo,
    zoo_config,
    zoo_weights,
)
from tests.worker.zoo_defaults import read_defaults

ROOT = Path(__file__).parents[3]
ENDS_THE_PROCESS = "olmo"
"""A module of mlx-lm's that does so where another package is missing."""

KINDS = ("baichuan_m1", "deepseek_v32", "gemma3n", "granitemoehybrid", "mamba2", "mimo_v2_flash")
"""Caches of every kind: states beside windows, pairs, shared keys, widths of their own."""

PHI3_SMALL = {
    "model_type": "phi3small",
    "dense_attention_every_n_layers": 2,
    "ff_intermediate_size": 128,
    "gegelu_limit": 20.0,
    "hidden_size": 128,
    "layer_norm_epsilon": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}
"""But for the size of its vocabulary."""

ALL = sorted(CONFIGS.keys() | OTHERS.keys())
SERVED = sorted(set(ALL) - REFUSED.keys())
TRIED = SERVED if IN_SOAK else sorted({*KINDS, *(SERVED[::6] if IN_CI else ())})
"""A sixth of all in CI, all in the soak."""


def test_at_least_fifty_of_the_fifty_two_are_served() -> None:
    """Those that are not are two at most."""
    assert len(CONFIGS) == 52
    assert len(CONFIGS.keys() - REFUSED.keys()) >= 50


def test_every_type_is_tried_or_told_of() -> None:
    """Each has a configuration, or is among the few that have none, with the reason."""
    assert ZOO_TYPES - CONFIGS.keys() - OTHERS.keys() == UNTRIED.keys()
    assert CONFIGS.keys().isdisjoint(OTHERS)


@pytest.mark.parametrize("name", TRIED)
def test_logits_are_those_of_mlx_lm(name: str, tmp_path: Path) -> None:
    """Read in chunks, one by one, and in a batch of unlike lengths, in any order."""
    folder = write_zoo(tmp_path, zoo_config(name))

    model, peer = _zoo(folder), Peer(folder)

    assert model.apart == (name in APART)
    assert prefilled_error(model, peer) <= PARITY
    assert ragged_error(model, peer) <= PARITY


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    """The error names mlx-lm's cache, or the type and what it lacks, before any weight is there."""
    words = REFUSED[name].removeprefix("keeps a ")
    words = f"{name} cannot be run here: .*Metal" if "Metal" in words else words
    with pytest.raises(InvalidModel, match=words):
        parse_zoo(zoo_config(name))


@pytest.mark.parametrize("name", ["exaone4", "mamba2"])
def test_whole_arenas_change_nothing(name: str, tmp_path: Path) -> None:
    """Where shapes must be few, slots without rows take part and are dropped."""
    folder = write_zoo(tmp_path, zoo_config(name))

    assert ragged_error(_zoo(folder), Peer(folder), whole_arenas=True) <= PARITY


@pytest.mark.parametrize("name", ["exaone4", "granitemoehybrid"])
def test_rows_that_decode_apart_say_the_same(name: str, tmp_path: Path) -> None:
    """A model that cannot take rows of unlike offsets takes them one by one."""
    folder = write_zoo(tmp_path, zoo_config(name))
    model = _zoo(folder)
    model.apart = True

    assert ragged_error(model, Peer(folder)) <= PARITY


def test_a_model_that_would_write_beyond_its_logits_is_refused() -> None:
    """It bars ids that it takes to be there: with fewer it would write into others' memory."""
    with pytest.raises(InvalidModel, match="phi3small needs 100352 tokens") as caught:
        parse_zoo(PHI3_SMALL | {"vocab_size": 100_351})
    assert parse_zoo(PHI3_SMALL | {"vocab_size": 100_352}).vocab == 100_352

    assert caught.value.field == "vocab_size"


def test_what_short_rows_do_not_show_is_known_by_name(tmp_path: Path) -> None:
    """A model that leaves keys out of long rows alone, and by their places, decodes row by row."""
    config = zoo_config("minimax_m3_vl")
    config["text_config"] = {**config["text_config"], "index_topk_blocks": 64}

    assert _zoo(write_zoo(tmp_path, config)).apart


def test_a_cache_whose_values_have_no_width_takes_a_batch() -> None:
    """An index keeps keys alone; to scatter nothing would end the process."""
    index = KVCache(kv_heads=1, head_dim=4, value_dim=0, dtype=mx.float32)
    caches = RowCaches([index], context_max=256, rows_max=2)
    for row in ROWS[:2]:
        assert caches.join(row, tokens=1)
    plan = caches.plan(
        tuple(ROWS[:2]),
        offsets=mx.zeros(2, dtype=mx.int32),
        lengths=(1, 1),
        width=1,
        dtype=mx.float32,
    )
    (group,) = plan.groups

    keys, values = index.fetch(mx.ones((2, 1, 1, 4)), mx.zeros((2, 1, 1, 0)), plan, group)
    mx.eval(keys, values, caches.state())

    assert keys[:, :, 0].tolist() == [[[1.0] * 4]] * 2
    assert values.shape[-1] == 0


@pytest.mark.parametrize("name", ["exaone4", "nemotron-nas"])
def test_several_tokens_of_each_row_are_as_one_by_one(name: str, tmp_path: Path) -> None:
    """Guesses are read side by side, past a window's end too."""
    folder = write_zoo(tmp_path, zoo_config(name))
    model, peer, width = _zoo(folder), Peer(folder), 3
    texts = [token_ids(length + width, seed=length) for length in (4, 29)]
    caches = RowCaches(model.new_caches(), context_max=model.context_max, rows_max=4)
    for row, text in zip(ROWS, texts, strict=False):
        assert caches.join(row, tokens=len(text)) is not False
        model.forward(Batch.prefill(text[:-width], 0, row), caches)
        mx.eval(caches.state())
    batch = Batch(
        tokens=mx.array([text[-width:] for text in texts], dtype=mx.int32),
        offsets=mx.array([len(text) - width for text in texts], dtype=mx.int32),
        lengths=tuple(map(len, texts)),
        rows=tuple(ROWS[:2]),
    )

    logits_of_rows = model.logits(model.forward(batch, caches)).reshape(2, width, -1)

    for rows, text in zip(logits_of_rows, texts, strict=True):
        assert error(rows, peer.logits(text)[-width:]) <= PARITY


@pytest.mark.parametrize("keeps_packed", [True, False])
def test_packed_weights_stay_so_or_become_numbers(keeps_packed: bool, tmp_path: Path) -> None:
    """Both lives give mlx-lm's logits, and take the bytes that they were said to."""
    config = zoo_config("olmoe")
    folder = write_model(tmp_path, *quantise(config, zoo_weights(config)))
    files = inspect_model(folder)

    model = load_model(files, form=FloatType.F32, progress=ignore_progress, packed=keeps_packed)

    assert prefilled_error(model, Peer(folder)) <= PARITY
    nbytes = sum(array.nbytes for array in model.parameters().values())
    assert files.packed
    said = files.kept.nbytes(4) if keeps_packed else 4 * files.weight_values
    assert nbytes == said


def test_caches_take_what_the_footprint_says(tmp_path: Path) -> None:
    """By positions, windows and states, of a model that has all three."""
    folder = write_zoo(tmp_path, zoo_config("baichuan_m1"))
    files = inspect_model(folder)
    model = load(folder)
    sizes = files.footprint.caches

    slot = sum(cache.slot_nbytes(256) for cache in model.new_caches() if cache is not None)

    windows = sum(window.kv_values_per_token * min(window.window, 256) for window in sizes.windows)
    states = sizes.recurrent_values_per_row
    assert slot == 4 * (256 * sizes.kv_values_per_token + windows + states)
    assert model.context_max == files.footprint.context_max == zoo_context(files.config.values)
    assert sizes.kv_format_problem(KVFormat.Q8) is not None


@pytest.mark.parametrize("name", SERVED)
def test_who_plans_reckons_with_no_less(name: str) -> None:
    """What names alone say of the caches is at least what the model itself shows."""
    config = zoo_config(name)
    shown, said = zoo_footprint(parse_zoo(config)).caches, zoo_cache_sizes(config)

    windows = sum(window.kv_values_per_token for window in shown.windows)
    assert said.kv_values_per_token >= shown.kv_values_per_token + windows
    assert said.recurrent_values_per_row >= shown.recurrent_values_per_row


def test_a_model_of_states_alone_has_no_keys() -> None:
    """It states the least width there is, so that nobody reckons with keys of any size."""
    caches = zoo_footprint(parse_zoo(zoo_config("mamba2"))).caches

    assert (caches.kv_values_per_token, caches.kv_heads, caches.head_dim) == (0, 1, 1)
    assert caches.recurrent_values_per_row > 0


def test_what_configs_leave_out_is_what_mlx_lm_takes() -> None:
    """The table that the controller has of it is of the sources of the version that is served."""
    assert json.loads(DEFAULTS_FILE.read_text(encoding="utf-8")) == read_defaults()


def test_what_is_stated_counts_before_what_is_left_out() -> None:
    """Whether it stands in the config itself or in that of its text."""
    bare = {"model_type": "kimi_k25", "text_config": {"num_hidden_layers": 2}}
    text = {"model_type": "kimi_k25", "text_config": {"num_hidden_layers": 2, "v_head_dim": 1024}}
    unknown = {"model_type": "nobody's", "num_hidden_layers": 2}

    width, wider = zoo_cache_sizes(bare).head_dim, zoo_cache_sizes(text).head_dim

    assert (width, wider) == (128 + 64, 1024)
    assert zoo_cache_sizes(bare).kv_values_per_token == 2 * 2 * 32 * width
    assert zoo_cache_sizes(unknown).kv_values_per_token == 2 * 2


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "packed"])
def test_names_alone_describe_no_smaller_a_model(tmp_path: Path, *, packed: bool) -> None:
    """Whoever has no mlx-lm counts no fewer weights, and lets a row be as long."""
    config = zoo_config("granitemoehybrid")
    if packed:
        folder = write_model(tmp_path, *quantise(config, zoo_weights(config)))
    else:
        folder = write_zoo(tmp_path, config)

    named, files = describe(folder, foreign=FOREIGN), inspect_model(folder)

    assert named.footprint.caches.foreign
    assert named.weight_values >= files.weight_values
    assert named.packed == files.packed == packed
    assert named.kept.fixed_nbytes == files.kept.fixed_nbytes
    assert named.footprint.context_max == files.footprint.context_max
    passes = named.footprint.passes
    assert (passes.hidden, passes.vocab) == (
        files.footprint.passes.hidden,
        files.footprint.passes.vocab,
    )


def test_the_names_are_those_of_mlx_lm() -> None:
    """Every module of a model, and nothing else, can be asked for."""
    own = {family.model_type for family in REGISTRY.values()} - {""}
    assert own - {"mistral", "qwen3_5_text", "qwen3_5_moe_text", "llava", "qwen2_5_vl"} < ZOO_TYPES
    if not IN_CI:
        return
    peer_names = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name == ENDS_THE_PROCESS:
            continue
        names = vars(importlib.import_module(f"mlx_lm.models.{module.name}"))
        if "Model" in names and "ModelArgs" in names:
            peer_names.add(module.name)
    assert peer_names | {ENDS_THE_PROCESS} == ZOO_TYPES


@pytest.mark.parametrize("name", ["base", "cache", "../llama", "os", "", "mlx_lm.models.llama", 3])
def test_no_other_name_is_imported(name: Any) -> None:
    """A config cannot name a module that is not a model's."""
    assert zoo_type({"model_type": name}) is None


def test_code_that_a_model_brings_is_refused() -> None:
    """mlx-lm would run it where it is told to trust it; nobody tells it here."""
    with pytest.raises(InvalidModel, match="runs none") as caught:
        parse_zoo(zoo_config("glm", model_file="model.py"))

    assert caught.value.field == "model_file"


@pytest.mark.parametrize(
    ("version", "words"), [(None, r"not installed: install mlxd\[zoo\]"), ("0.33.0", "0.33.0 is")]
)
def test_another_mlx_lm_is_refused(version: str | None, words: str) -> None:
    """Without it, and in any version but the one that was tried, the error says what to install."""
    with pytest.raises(InvalidModel, match=words):
        check_installed(MLX_LM, "glm", version)
    check_installed(MLX_LM, "glm", ZOO_VERSION)


def test_the_extra_brings_the_version_that_was_tried() -> None:
    """pyproject pins the one version that the adapter takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["optional-dependencies"][ZOO_EXTRA] == [f"mlx-lm=={ZOO_VERSION}"]


def test_a_module_that_ends_the_process_is_an_error_of_the_model() -> None:
    """It asks for a package that is not there, and would take the worker with it."""
    with pytest.raises(InvalidModel, match="olmo cannot be imported"):
        parse_zoo({"model_type": ENDS_THE_PROCESS})


def test_an_architecture_of_our_own_is_never_left_to_it(tmp_path: Path) -> None:
    """A type that is ours under a name that is not stays refused."""
    write_config(tmp_path, {"architectures": ["LlamaForOthers"], "model_type": "llama"})

    with pytest.raises(InvalidModel, match="is not supported; known: "):
        inspect_model(tmp_path)


def test_a_tensor_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    """mlx-lm's own words name it."""
    config = zoo_config("glm")
    weights = zoo_weights(config)
    few = dict(list(weights.items())[1:])
    for stored in (few, weights | {"model.no_use": weights["model.norm.weight"]}):
        with pytest.raises(InvalidModel, match=r"Missing 1|model.no_use"):
            inspect_model(write_model(tmp_path, config, stored))


def test_a_config_that_mlx_lm_refuses_is_an_error_of_the_model() -> None:
    """What it raises is told."""
    with pytest.raises(InvalidModel, match="mlx-lm's glm refuses this config"):
        parse_zoo({"model_type": "glm"})


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_hidden_layers": 10**9}, "num_hidden_layers"), ({"num_key_value_heads": 3}, "")],
)
def test_a_config_that_makes_no_model_is_refused_soon(changes: Any, field: str) -> None:
    """Numbers of parts are bounded; what does not fit together is an error of the model."""
    with pytest.raises(InvalidModel) as caught:
        parse_zoo(zoo_config("granite", **changes))

    assert caught.value.field == field


def test_half_precision_is_served_as_it_is(tmp_path: Path) -> None:
    """A load in bfloat16 has caches of it, and logits near those of float32."""
    folder = write_zoo(tmp_path, zoo_config("glm"))
    model = load(folder, FloatType.BF16)

    distance = prefilled_error(model, Peer(folder))

    assert math.isfinite(distance)
    assert 0 < distance < 0.1
    assert {cache.dtype for cache in model.new_caches() if isinstance(cache, KVCache)} == {
        mx.bfloat16
    }


def _zoo(folder: Path) -> ZooModel:
    model = load_model(inspect_folder(folder), form=FloatType.F32, progress=ignore_progress)
    assert isinstance(model, ZooModel)
    return model
