"""The Llama family against mlx-lm, and rows in a batch against the same rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.cache.base import RowError, RowId
from mlxd_worker.models.base import Batch
from tests.worker.tiny import (
    caches_of,
    config_with,
    difference,
    forced_logits,
    ints,
    load,
    write_model,
)

TOLERANCE = 1e-3
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 24},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "other-theta": {"rope_theta": 500.0},
    "linear-rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3-rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "interleaved-rope": {"rope_traditional": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
}
ROWS = [RowId(10), RowId(11), RowId(12), RowId(13)]


def token_ids(count: int, *, seed: int, vocab: int = 61) -> list[int]:
    """Return random token ids."""
    return ints(mx.random.randint(0, vocab, (count,), key=mx.random.key(seed)))


@pytest.mark.parametrize("name", VARIANTS)
def test_teacher_forced_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the config's variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_model(tmp_path, config_with(**VARIANTS[name]))
    tokens = token_ids(300, seed=1)
    peer, _ = load_peer(folder)
    expected = peer(mx.array([tokens]), cache=make_prompt_cache(peer))[0]

    model = load(folder)
    logits = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[1, 2, 97, 256, 299])

    assert logits.dtype == mx.float32
    assert difference(logits, expected) < TOLERANCE


def test_variants_differ(tmp_path: Path) -> None:
    """Each variant of the config has an effect: an ignored key would leave logits the same."""
    tokens = token_ids(80, seed=2)
    results = {}
    for name in ("grouped", "other-theta", "linear-rope", "llama3-rope", "interleaved-rope"):
        model = load(write_model(tmp_path / name, config_with(**VARIANTS[name])))
        results[name] = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[])

    plain = results.pop("grouped")

    assert all(difference(plain, other) > 0.1 for other in results.values())


def test_rope_parameters_are_the_same_as_rope_scaling(tmp_path: Path) -> None:
    """The newer spelling of the rotary settings gives the same model as the older one."""
    older = config_with(rope_scaling=LLAMA3, rope_theta=500000.0)
    newer = config_with(rope_parameters={**LLAMA3, "rope_theta": 500000.0}, rope_theta=None)
    tokens = token_ids(80, seed=2)
    models = [load(write_model(tmp_path / name, c)) for name, c in (("a", older), ("b", newer))]

    first, second = (forced_logits(m, caches_of(m), ROWS[0], tokens, cuts=[]) for m in models)

    assert mx.array_equal(first, second)


def test_a_ragged_batch_equals_each_row_alone(tmp_path: Path) -> None:
    """Rows of different lengths and classes, in any order, get the logits they get alone."""
    model = load(write_model(tmp_path, config_with()))
    lengths = [3, 250, 300, 20]
    texts = [token_ids(length + 12, seed=length) for length in lengths]
    alone = [
        forced_logits(model, caches_of(model), ROWS[0], text, cuts=range(length, length + 12))
        for text, length in zip(texts, lengths, strict=True)
    ]
    caches = caches_of(model)
    for row, text, length in zip(ROWS, texts, lengths, strict=True):
        caches.join(row, tokens=length)
        model.forward(Batch.prefill(text[:length], 0, row), caches)
        mx.eval(caches.state())

    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1, 3, 0]]
    fed = list(lengths)
    for step in range(12):
        chosen = orders[step % len(orders)]
        for index in chosen:
            caches.reserve(ROWS[index], tokens=fed[index] + 1)
        batch = Batch.decode(
            [texts[index][fed[index]] for index in chosen],
            [fed[index] for index in chosen],
            [ROWS[index] for index in chosen],
        )
        logits = model.logits(model.forward(batch, caches))
        mx.eval(logits, caches.state())
        for place, index in enumerate(chosen):
            assert difference(logits[place], alone[index][fed[index]]) < TOLERANCE
            fed[index] += 1

    assert caches.table.capacity(ROWS[1]) == 512  # it crossed a class on the way


def test_several_tokens_for_several_rows(tmp_path: Path) -> None:
    """A batch of rows with more than one token each (as speculation needs) is causal per row."""
    model = load(write_model(tmp_path, config_with()))
    texts = [token_ids(length, seed=length) for length in (10, 40)]
    alone = [
        forced_logits(model, caches_of(model), ROWS[0], text, cuts=[len(text) - 3])
        for text in texts
    ]
    caches = caches_of(model)
    for row, text in zip(ROWS, texts, strict=False):
        caches.join(row, tokens=len(text))
        model.forward(Batch.prefill(text[:-3], 0, row), caches)

    batch = Batch(
        tokens=mx.array([text[-3:] for text in texts], dtype=mx.int32),
        offsets=mx.array([len(text) - 3 for text in texts], dtype=mx.int32),
        lengths=tuple(len(text) for text in texts),
        rows=tuple(ROWS[:2]),
    )
    logits = model.logits(model.forward(batch, caches)).reshape(2, 3, -1)

    assert difference(logits[0], alone[0][-3:]) < TOLERANCE
    assert difference(logits[1], alone[1][-3:]) < TOLERANCE


def test_a_write_beyond_the_reservation_is_refused(tmp_path: Path) -> None:
    """A token past what its row reserved raises before anything is written."""
    model = load(write_model(tmp_path, config_with()))
    caches = caches_of(model)
    caches.join(ROWS[0], tokens=200)

    with pytest.raises(RowError, match="257 tokens"):
        model.forward(Batch.decode([1], [256], [ROWS[0]]), caches)


def test_a_poisoned_row_leaves_nothing_behind(tmp_path: Path) -> None:
    """NaN in one row reaches neither its neighbours nor the next row in its slot."""
    model = load(write_model(tmp_path, config_with()))
    tokens = token_ids(12, seed=3)
    expected = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[11])[-1]
    caches = caches_of(model)
    forced_logits(model, caches, ROWS[1], tokens[:11], cuts=[])
    caches.join(ROWS[2], tokens=100)
    place = caches.table.place(ROWS[2])
    for array in caches.arrays().values():
        array[place.slot] = mx.nan
    neighbours = model.forward(Batch.decode(tokens[11:], [11], [ROWS[1]]), caches)
    beside = model.logits(neighbours)[0]
    caches.leave(ROWS[2])

    forced_logits(model, caches, ROWS[3], tokens[:11], cuts=[])
    assert caches.contents.restore(ROWS[1], [], 11)
    batch = Batch.decode([tokens[11]] * 2, [11, 11], [ROWS[1], ROWS[3]])
    logits = model.logits(model.forward(batch, caches))

    assert difference(beside, expected) < TOLERANCE
    assert difference(logits[0], expected) < TOLERANCE
    assert difference(logits[1], expected) < TOLERANCE


@pytest.mark.parametrize("form", [FloatType.BF16, FloatType.F16])
def test_half_precision_runs_end_to_end(form: FloatType, tmp_path: Path) -> None:
    """Weights kept in half precision give caches of that type and logits near float32's."""
    folder = write_model(tmp_path, config_with())
    tokens = token_ids(20, seed=4)
    exact = forced_logits(load(folder), caches_of(load(folder)), ROWS[0], tokens, cuts=[10])
    model = load(folder, form)
    caches = caches_of(model)

    logits = forced_logits(model, caches, ROWS[0], tokens, cuts=[10])
    caches.join(ROWS[1], tokens=5)
    batch = Batch.decode([1, 2], [20, 0], [ROWS[0], ROWS[1]])
    ragged = model.logits(model.forward(batch, caches))

    assert logits.dtype == ragged.dtype == mx.float32
    assert {array.dtype for array in caches.state()} == {model.parameters()["lm_head.weight"].dtype}
    assert difference(logits, exact) < 0.6
    assert bool(mx.all(mx.isfinite(ragged)).item())


def test_parameters_name_each_array_once(tmp_path: Path) -> None:
    """A tied head is one array, not two, and the sum is the checkpoint's values."""
    tied = load(write_model(tmp_path / "tied", config_with(tie_word_embeddings=True)))
    untied = load(write_model(tmp_path / "untied", config_with()))
    arrays = list(tied.parameters().values())

    assert len({id(array) for array in arrays}) == len(arrays)
    extra = untied.parameters().keys() - tied.parameters().keys()
    assert extra == {"lm_head.weight"}
