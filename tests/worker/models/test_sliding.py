"""Models with sliding windows, all layers or some, against mlx-lm and against dense attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import Kind, LayerCache, RowId
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kinds import AttentionGeometry, as_attention
from mlxd_worker.cache.layers.recurrent import RecurrentCache
from mlxd_worker.models.base import Batch, Capabilities
from mlxd_worker.models.loader import inspect_model
from tests.support.engines import tiny_engine
from tests.support.random_model import LARGE, write_sliding_model
from tests.worker.cache.keeping import snapshots_of
from tests.worker.tiny import (
    caches_of,
    config_with,
    forced_logits,
    ints,
    load,
    random_weights,
    write_model,
)

TOLERANCE = 1e-3
"""Of the largest logit."""
WINDOW = 40
SLIDING, FULL = "sliding_attention", "full_attention"
ROWS = [RowId(10), RowId(11), RowId(12), RowId(13)]

VARIANTS: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "mistral-mixed": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": WINDOW,
        "layer_types": [FULL, SLIDING, FULL],
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen2-whole": {"architectures": ["Qwen2ForCausalLM"]},
}
SLIDES = {
    "mistral": [True] * 3,
    "mistral-mixed": [False, True, False],
    "qwen2": [False, True, True],
    "qwen2-whole": [False] * 3,
}


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of one variant."""
    return config_with(num_hidden_layers=3, **VARIANTS[name])


def token_ids(count: int, *, seed: int) -> list[int]:
    """Return random token ids."""
    return ints(mx.random.randint(0, 61, (count,), key=mx.random.key(seed)))


def error(left: mx.array, right: mx.array) -> float:
    """Return the largest difference, relative to the largest value."""
    assert left.shape == right.shape
    return cast("float", (mx.max(mx.abs(left - right)) / mx.max(mx.abs(right))).item())


def dense_logits(
    config: Mapping[str, Any], slides: Sequence[bool], tokens: Sequence[int]
) -> mx.array:
    """Return all logits by one pass over everything, with a mask where a layer slides."""
    weights = random_weights(config)
    rows = weights["model.embed_tokens.weight"][mx.array(list(tokens))]
    ago = mx.arange(len(tokens))[:, None] - mx.arange(len(tokens))
    for index, slides_here in enumerate(slides):
        prefix = f"model.layers.{index}."
        seen = (ago >= 0) & (ago < WINDOW) if slides_here else ago >= 0
        normed = mx.fast.rms_norm(rows, weights[f"{prefix}input_layernorm.weight"], 1e-5)
        rows = rows + dense_attention(weights, f"{prefix}self_attn.", normed, seen)
        normed = mx.fast.rms_norm(rows, weights[f"{prefix}post_attention_layernorm.weight"], 1e-5)
        gate, up = (
            normed @ weights[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up")
        )
        rows = rows + (gate * mx.sigmoid(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
    rows = mx.fast.rms_norm(rows, weights["model.norm.weight"], 1e-5)
    return rows @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def dense_attention(
    weights: Mapping[str, mx.array], prefix: str, rows: mx.array, seen: mx.array
) -> mx.array:
    """Return what one layer's attention adds: 4 heads, 2 of keys, 8 wide."""

    def heads(part: str) -> mx.array:
        heads_made = rows @ weights[f"{prefix}{part}_proj.weight"].T
        heads_made = heads_made + weights.get(f"{prefix}{part}_proj.bias", mx.array(0.0))
        heads_made = heads_made.reshape(1, rows.shape[0], -1, 8).transpose(0, 2, 1, 3)
        return mx.repeat(heads_made, 4 // heads_made.shape[1], axis=1)

    def turn_heads(part: str) -> mx.array:
        return mx.fast.rope(heads(part), 8, traditional=False, base=10000.0, scale=1.0, offset=0)

    scores = turn_heads("q") @ turn_heads("k").transpose(0, 1, 3, 2) * 8**-0.5
    read = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ heads("v")
    flat = read.transpose(0, 2, 1, 3).reshape(rows.shape[0], -1)
    return flat @ weights[f"{prefix}o_proj.weight"].T


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_decode_equal_dense_attention(name: str, tmp_path: Path) -> None:
    """Whatever the chunks, and one by one past every wrap, logits are those of one dense pass."""
    config = config_of(name)
    tokens = token_ids(300, seed=1)
    expected = dense_logits(config, SLIDES[name], tokens)
    model = load(write_model(tmp_path, config))

    for cuts in ([1, 2, 40, 41, 80, 97, 177, 256], [100], [39, *range(40, 140)], []):
        logits = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=cuts)
        assert error(logits, expected) < TOLERANCE


def load_sliding_peer(folder: Path, name: str) -> tuple[Any, list[Any]]:
    """Return mlx-lm's Llama with the weights of a variant, and its caches.

    It has no Qwen2 with windows, but the same arithmetic, with a bias more, which is zero. It
    cannot do without a whole layer, but all its caches can rotate.
    """
    config = config_of(name)
    weights = random_weights(config)
    if name == "mistral":
        peer, _ = load_peer(write_model(folder, config, weights))
        make: Callable[..., Any] = RotatingKVCache
        return peer, [make(max_size=WINDOW) for _ in SLIDES[name]]
    config["layer_types"] = [SLIDING if slides else FULL for slides in SLIDES[name]]
    if name == "qwen2":
        config |= {"attention_bias": True, "model_type": "llama"}
        for index in range(3):
            weights[f"model.layers.{index}.self_attn.o_proj.bias"] = mx.zeros(32)
    peer, _ = load_peer(write_model(folder, config, weights))
    return peer, make_prompt_cache(peer)


@pytest.mark.parametrize("name", ["mistral", "mistral-mixed", "qwen2"])
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Chunks and single tokens through mlx-lm's sliding layers and ours give the same logits."""
    model = load(write_model(tmp_path / "ours", config_of(name)))
    tokens = token_ids(200, seed=2)
    peer, kept = load_sliding_peer(tmp_path / "theirs", name)
    pieces = [(0, 30), (30, 130), *((at, at + 1) for at in range(130, 200))]
    expected = mx.concatenate([peer(mx.array([tokens[a:b]]), cache=kept)[0] for a, b in pieces])

    logits = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[50, 51, 150])

    assert error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows_equal_dense_attention(name: str, tmp_path: Path) -> None:
    """Rows before, at and long past their wraps, in any order, get the logits they get alone."""
    config = config_of(name)
    lengths = [3, WINDOW - 2, 75, 300]
    steps = 8
    texts = [token_ids(length + steps, seed=length) for length in lengths]
    expected = [dense_logits(config, SLIDES[name], text) for text in texts]
    model = load(write_model(tmp_path, config))
    caches = caches_of(model)
    for row, text, length in zip(ROWS, texts, lengths, strict=True):
        caches.join(row, tokens=length + steps)
        for begin, end in ((0, length // 2), (length // 2, length)):
            model.forward(Batch.prefill(text[begin:end], begin, row), caches)
            mx.eval(caches.state())

    fed = list(lengths)
    orders = [[0, 1, 2, 3], [3, 1, 0], [2, 1], [1, 0, 3, 2]]
    for step in range(steps):
        chosen = orders[step % len(orders)]
        batch = Batch.decode(
            [texts[index][fed[index]] for index in chosen],
            [fed[index] for index in chosen],
            [ROWS[index] for index in chosen],
        )
        logits = model.logits(model.forward(batch, caches))
        mx.eval(logits, caches.state())
        for place, index in enumerate(chosen):
            assert error(logits[place], expected[index][fed[index]]) < TOLERANCE
            fed[index] += 1


def test_several_tokens_for_several_rows_that_wrap(tmp_path: Path) -> None:
    """A batch of more than one token a row slides for each of them, wrapped or not."""
    config = config_of("qwen2")
    texts = [token_ids(length, seed=length) for length in (10, WINDOW + 1, 130)]
    expected = [dense_logits(config, SLIDES["qwen2"], text) for text in texts]
    model = load(write_model(tmp_path, config))
    caches = caches_of(model)
    for row, text in zip(ROWS, texts, strict=False):
        caches.join(row, tokens=len(text))
        model.forward(Batch.prefill(text[:-3], 0, row), caches)
        mx.eval(caches.state())

    batch = Batch(
        tokens=mx.array([text[-3:] for text in texts], dtype=mx.int32),
        offsets=mx.array([len(text) - 3 for text in texts], dtype=mx.int32),
        lengths=tuple(len(text) for text in texts),
        rows=tuple(ROWS[:3]),
    )
    logits = model.logits(model.forward(batch, caches)).reshape(3, 3, -1)

    for place, wanted in enumerate(expected):
        assert error(logits[place], wanted[-3:]) < TOLERANCE


def test_a_window_acts(tmp_path: Path) -> None:
    """Logits are those of whole attention up to the window's end, and others after it."""
    config = config_of("mistral")
    tokens = token_ids(WINDOW + 20, seed=3)
    whole = dense_logits(config, [False] * 3, tokens)
    model = load(write_model(tmp_path, config))

    logits = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[17])

    assert error(logits[:WINDOW], whole[:WINDOW]) < TOLERANCE
    assert error(logits[WINDOW : WINDOW + 1], whole[WINDOW : WINDOW + 1]) > 10 * TOLERANCE


def kinds_of(caches: Sequence[LayerCache | None]) -> list[Kind | None]:
    """Return the kind of each layer's cache."""
    return [None if cache is None else cache.kind for cache in caches]


def test_each_layer_gets_the_cache_of_its_geometry(tmp_path: Path) -> None:
    """Sliding layers rotate, the others do not."""
    model = load(write_model(tmp_path, config_of("mistral-mixed")))

    assert kinds_of(model.new_caches()) == [Kind.STANDARD, Kind.ROTATING, Kind.STANDARD]


@pytest.mark.parametrize(
    ("window", "kv", "context_max", "kind"),
    [
        (None, KVFormat.MODEL, 512, Kind.STANDARD),
        (None, KVFormat.Q8, 512, Kind.QUANTIZED),
        (300, KVFormat.MODEL, 512, Kind.ROTATING),
        (300, KVFormat.Q4, 512, Kind.ROTATING),
        (300, KVFormat.MODEL, 257, Kind.ROTATING),  # whose arenas hold 512
        (300, KVFormat.MODEL, 256, Kind.STANDARD),
        (300, KVFormat.Q8, 256, Kind.STANDARD),
        (512, KVFormat.MODEL, 512, Kind.STANDARD),
    ],
)
def test_a_window_rotates_where_rows_outgrow_it(
    window: int | None, kv: KVFormat, context_max: int, kind: Kind
) -> None:
    """A window as long as any arena's rows remembers all; with a window nothing is quantised."""
    cache = AttentionGeometry(2, 64, window).new_cache(mx.float32, kv=kv, context_max=context_max)

    assert cache.kind is kind


@pytest.mark.parametrize("name", VARIANTS)
def test_the_footprint_is_what_a_row_takes(name: str, tmp_path: Path) -> None:
    """What the fit reckons with, by config alone, is what the caches take."""
    folder = write_model(tmp_path, config_of(name))
    footprint = inspect_model(folder).footprint.caches
    caches = [cache for cache in load(folder).new_caches() if cache is not None]

    for capacity in (16, 256, 1024):
        values = capacity * footprint.kv_values_per_token + sum(
            min(capacity, part.window) * part.kv_values_per_token for part in footprint.windows
        )
        assert sum(cache.slot_nbytes(capacity) for cache in caches) == 4 * values
    assert footprint.recurrent_values_per_row == 0


class Sparse:
    """A model whose second layer remembers nothing; it says no more than its geometry."""

    capabilities = Capabilities()
    vocab_size = 4
    context_max = 512
    dtype = mx.float32
    attention = (AttentionGeometry(1, 4), None, AttentionGeometry(1, 4, window=8))

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches."""
        longest = self.context_max if context_max is None else context_max
        return [
            None if geometry is None else geometry.new_cache(self.dtype, kv=kv, context_max=longest)
            for geometry in self.attention
        ]

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Attend with keys, values and queries that are the positions."""
        plan = caches.plan(
            batch.rows,
            offsets=batch.offsets,
            lengths=batch.lengths,
            width=batch.width,
            dtype=self.dtype,
        )
        at = (batch.offsets[:, None] + mx.arange(batch.width)).astype(self.dtype)
        rows = mx.broadcast_to(at[:, None, :, None], (*at.shape[:1], 1, batch.width, 4))
        for cache in caches.layers:
            if cache is not None:
                as_attention(cache).attend(Asked(rows, rows, rows, plan, 1.0))
        return rows.reshape(-1, 4)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the hidden rows."""
        return hidden

    def parameters(self) -> Mapping[str, mx.array]:
        """Return none."""
        return {}


def test_a_layer_without_state_is_skipped_everywhere() -> None:
    """An architecture states geometry alone and gets its caches; a layer of None takes no part."""
    model = Sparse()
    caches = caches_of(model)
    caches.join(ROWS[0], tokens=30)
    model.forward(Batch.prefill([0] * 20, 0, ROWS[0]), caches)
    mx.eval(caches.state())
    kept = snapshots_of(caches.contents, ROWS[0], 0)
    model.forward(Batch.prefill([0] * 5, 20, ROWS[0]), caches)
    mx.eval(caches.state())

    assert kinds_of(caches.layers) == [Kind.STANDARD, None, Kind.ROTATING]
    assert set(kept) == {Kind.STANDARD, Kind.ROTATING}
    assert {name.split(".")[1] for name in caches.arrays()} == {"0", "2"}
    assert caches.contents.restore(ROWS[0], list(kept.values()), 20)
    for snapshot in kept.values():
        snapshot.close()
    caches.leave(ROWS[0])
    assert (caches.nbytes, caches.contents.book.live) == (0, 0)


def test_only_attention_attends() -> None:
    """A layer without state, or with a recurrent one, is no attention layer's: a loud bug."""
    with pytest.raises(TypeError, match="NoneType"):
        as_attention(None)
    with pytest.raises(TypeError, match="RecurrentCache"):
        as_attention(RecurrentCache([]))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_sliding_model_generates_past_its_window(mixed: bool, tmp_path: Path) -> None:
    """Greedy text of a sliding folder does not depend on how the prompt was cut."""
    folder = write_sliding_model(tmp_path, window=24, mixed=mixed)
    prompt = [3 + index % 300 for index in range(0, 700, 7)]
    texts = [tiny_engine(folder, chunk=chunk).alone(prompt, max_tokens=60).ids for chunk in (7, 64)]

    assert texts[0] == texts[1]
    assert len(texts[0]) == 60


def test_the_large_sliding_model_is_large(tmp_path: Path) -> None:
    """The model for timings holds 100 MB of float32 weights at least, by its headers."""
    folder = write_sliding_model(tmp_path, window=1024, mixed=True, shape=LARGE)
    files = inspect_model(folder)

    assert 4 * files.weight_values >= 100_000_000
    assert [part.window for part in files.footprint.caches.windows] == [1024]
