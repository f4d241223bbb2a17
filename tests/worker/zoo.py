"""Small random models of mlx-lm's architectures on disk, and mlx-lm's logits of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_models.describe import Description
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model
from mlxd_worker.models.zoo.adapter import ZOO
from mlxd_worker.models.zoo.peer import hollow, parameters_of, without_compiling
from tests.worker.hybrid import error, token_ids
from tests.worker.kin import ROWS, worst_decoded
from tests.worker.tiny import forced_logits, write_model

LIVELY = 1.0
PARITY = 1e-3
LENGTHS = (3, 9, 17, 31)
STEPS = 5


def _read(name: str) -> dict[str, dict[str, Any]]:
    configs = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return {
        config["model_type"]: {"architectures": ["NoneOfOurOwn"], **config} for config in configs
    }


CONFIGS: Mapping[str, dict[str, Any]] = _read("zoo_configs.json")
"""The configurations of mlx-lm's own tests, some of them narrower, by type."""

OTHERS: Mapping[str, dict[str, Any]] = _read("zoo_other_configs.json")
"""One of each type that has none there: what its own class of arguments asks for, made small."""

CALM = {"gemma4": 0.4}
"""By how much queries and keys are shortened where scores are their whole product: a rounding would
decide what attention falls on."""

USUAL_GAIN = 1.5
GAINS = {"longcat_flash_ngram": 1.0}
"""What a layer amplifies by, of models that make roundings large: at the usual gain two libraries
of products already differ by 1e-3 here."""

HEADS = {
    "baichuan_m1": "model.norm.weight",
    "phixtral": "lm_head.linear.weight",
    "talkie": "lm_head",
}
"""What scales logits where the head is brought to length one, or is named otherwise."""

_SHORTENED = ("q_norm.weight", "k_norm.weight")

APART = {"afm7", "gemma2", "gpt_bigcode", "minimax_m3_vl"}
"""Whose layers take a row's length from the width of its keys, a mask for one of heads, one
position for all rows, or places for positions: rows decode one by one."""

REFUSED = {
    "bitnet": "kernels for Metal alone",
    "deepseek_v41": "keeps a LayerCache",
    "llama4": "keeps a ChunkedKVCache",
    "muse_spark": "kernels for Metal alone",
    "plamo3": "reads prompts by a window one wider than that by which it goes on",
}
"""What cannot be served, and what that is for."""

UNTRIED = {
    "phi3small": "some of its logits are minus infinity, of which there is no figure",
    "olmo": "asks for a package that mlx-lm does not bring",
    "prism_hadamard_qwen35": "takes checkpoints of a packing of its own alone",
}
"""Types without a configuration here."""


def zoo_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return one of `CONFIGS` or `OTHERS` with `changes`."""
    return {**(CONFIGS.get(name) or OTHERS[name]), **changes}


def zoo_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, mx.array]:
    """Return a random array for every parameter, lively enough that logits differ."""
    calm = CALM.get(str(config["model_type"]), 1.0)
    gain = GAINS.get(str(config["model_type"]), USUAL_GAIN)
    keys = iter(mx.random.split(mx.random.key(seed), 4096))
    weights: dict[str, mx.array] = {}
    peer = hollow(str(config["model_type"]), config)
    for name, array in parameters_of(peer):
        noise = mx.random.normal(array.shape, key=next(keys))
        if not mx.issubdtype(array.dtype, mx.floating):
            weights[name] = mx.zeros(array.shape, dtype=array.dtype)
        elif "norm" in name and array.ndim == 1:
            weights[name] = (1 + 0.1 * noise) * (calm if name.endswith(_SHORTENED) else 1.0)
        elif array.ndim < 2:
            weights[name] = 0.2 * noise
        else:
            fan = array.shape[-1] if array.shape[-1] > 1 else array.shape[-2]
            weights[name] = noise * (gain / fan**0.5)
    return weights


def write_zoo(folder: Path, config: Mapping[str, Any], **more: Any) -> Path:
    """Write a model whose logits deviate by one at least; return `folder`."""
    weights = zoo_weights(config, **more)
    write_model(folder, config, weights)
    spread = cast("float", mx.std(Peer(folder).logits(token_ids(32, seed=5), lively=0.0)).item())
    if spread < 2 * LIVELY:
        head = HEADS.get(str(config["model_type"]))
        head = head or next((name for name in weights if name.endswith("lm_head.weight")), None)
        head = head or next(name for name in weights if "embed" in name or "wte" in name)
        weights[head] = weights[head] * (2 * LIVELY / spread)
        write_model(folder, config, weights)
    return folder


def inspect_folder(folder: Path) -> Description:
    """Return a model that goes through mlx-lm even where its type is ours."""
    return inspect_model(folder, registry={"NoneOfOurOwn": ZOO})


class Peer:
    """mlx-lm's own model of a folder."""

    def __init__(self, folder: Path) -> None:
        with without_compiling():
            self._model, _ = load_peer(folder)

    def logits(self, tokens: Sequence[int], *, lively: float = LIVELY) -> mx.array:
        """Return the logits of every position of one row, read at once."""
        with without_compiling():
            cache = make_prompt_cache(self._model)
            logits = self._model(mx.array([list(tokens)]), cache=cache)[0]
            mx.eval(logits)
        assert cast("float", mx.std(logits).item()) >= lively
        return cast("mx.array", logits)


def prefilled_error(model: Model, peer: Peer, *, tokens: int = 40) -> float:
    """Return the largest error of one row, read in chunks and one by one."""
    text = token_ids(tokens, seed=1)
    caches = RowCaches(model.new_caches(), context_max=model.context_max, rows_max=4)
    cuts = [1, 2, 13, 20, 21, 22, 23, 24, 33]
    ours = forced_logits(model, caches, ROWS[0], text, cuts=cuts)
    return error(ours, peer.logits(text))


def ragged_error(
    model: Model, peer: Peer, *, whole_arenas: bool = False, caches: RowCaches | None = None
) -> float:
    """Return the largest error of rows of unlike lengths that decode together, in any order."""
    texts = [token_ids(length + STEPS, seed=length) for length in LENGTHS]
    expected = [peer.logits(text) for text in texts]
    caches = caches or RowCaches(
        model.new_caches(),
        context_max=model.context_max,
        rows_max=8,
        bounded_shapes=whole_arenas,
    )
    for row, text, length in zip(ROWS, texts, LENGTHS, strict=True):
        assert caches.join(row, tokens=length + STEPS) is not False
        model.forward(Batch.prefill(text[:length], 0, row), caches)
        mx.eval(caches.state())
    orders = [[0, 1, 2, 3], [3, 1, 0], [2, 1], [1, 0, 3, 2], [0]]
    return worst_decoded(model, caches, texts, expected, LENGTHS, orders)
