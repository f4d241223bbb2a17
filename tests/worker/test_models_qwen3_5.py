"""Qwen3.5 against mlx-lm, rows in a batch against the same rows alone, and what it keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_peer

from mlxd_shared.errors import InvalidModel
from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.recurrent import RecurrentCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.memory.residency import FloatType
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model
from tests.real_inputs import real_input
from tests.worker.hybrid import (
    ROPE,
    converted,
    hybrid_config,
    hybrid_weights,
    write_hybrid,
)
from tests.worker.tiny import caches_of, floats, forced_logits, ints, load, write_model

TOLERANCE = 1e-3
"""Of the largest logit."""
LIVELY = 1.0
"""The least standard deviation of logits that tell a wrong model from a right one."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared-keys": {},
    "tied": {"tie_word_embeddings": True},
    "own-keys": {"linear_num_key_heads": 4},
    "one-key-head": {"linear_num_key_heads": 1},
    "wide-keys": {"linear_key_head_dim": 20, "linear_value_head_dim": 4},
    "short-kernel": {"linear_conv_kernel_dim": 2},
    "long-kernel": {"linear_conv_kernel_dim": 7},
    "interval-3": {"full_attention_interval": 3},
    "ends-recurrent": {"num_hidden_layers": 5},
    "biases": {"attention_bias": True},
    "multi-query": {"num_key_value_heads": 1},
    "half-rotary": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "whole-rotary": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    "other-theta": {"rope_parameters": {**ROPE, "rope_theta": 500.0}},
    "linear-rope": {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
    "llama3-rope": {"rope_parameters": {**ROPE, **LLAMA3}},
}
ROWS = [RowId(10), RowId(11), RowId(12), RowId(13)]


def token_ids(count: int, *, seed: int, vocab: int = 61) -> list[int]:
    """Return random token ids."""
    return ints(mx.random.randint(0, vocab, (count,), key=mx.random.key(seed)))


def error(left: mx.array, right: mx.array) -> float:
    """Return the largest difference, relative to the largest value."""
    assert left.shape == right.shape
    return cast("float", (mx.max(mx.abs(left - right)) / mx.max(mx.abs(right))).item())


def peer_logits(folder: Path, tokens: Sequence[int]) -> mx.array:
    """Return mlx-lm's logits of every position, lively enough to compare with."""
    peer, _ = load_peer(folder)
    logits = peer(mx.array([list(tokens)]), cache=make_prompt_cache(peer))[0]
    assert cast("float", mx.std(logits).item()) >= LIVELY
    return cast("mx.array", logits)


def fed(model: Model, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> RowCaches:
    """Return caches in which each text's first tokens have been prefilled, one row a text."""
    caches = caches_of(model)
    for row, text, length in zip(ROWS, texts, lengths, strict=False):
        assert caches.join(row, tokens=length) is not False
        model.forward(Batch.prefill(text[:length], 0, row), caches)
        mx.eval(caches.state())
    return caches


@pytest.mark.parametrize("name", VARIANTS)
def test_teacher_forced_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the config's variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_hybrid(tmp_path, **VARIANTS[name])
    tokens = token_ids(290, seed=1)
    model = load(folder)

    got = forced_logits(
        model, caches_of(model), ROWS[0], tokens, cuts=[1, 2, 9, 73, 138, 270, *range(271, 290)]
    )

    assert error(got, peer_logits(folder, tokens)) < TOLERANCE


def test_variants_differ(tmp_path: Path) -> None:
    """Each variant of the rotary settings has an effect: an ignored key would leave none."""
    tokens = token_ids(80, seed=2)
    results = {}
    for name in (
        "shared-keys",
        "half-rotary",
        "whole-rotary",
        "other-theta",
        "linear-rope",
        "llama3-rope",
    ):
        model = load(write_hybrid(tmp_path / name, **VARIANTS[name]))
        results[name] = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[])

    plain = results.pop("shared-keys")

    assert all(error(other, plain) > 10 * TOLERANCE for other in results.values())


def test_a_published_config_gives_the_peers_logits(tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", "Qwen--Qwen3.5-27B", "config.json")
    text = json.loads(path.read_text())["text_config"]
    config = {**text, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"}
    folder = write_model(tmp_path, config, hybrid_weights(config))
    tokens = token_ids(100, seed=3, vocab=config["vocab_size"])
    model = load(folder)

    got = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[67])

    assert error(got, peer_logits(folder, tokens)) < TOLERANCE


def test_both_layouts_of_a_checkpoint_are_one_model(tmp_path: Path) -> None:
    """A checkpoint as published and the same one as mlx-lm stores it give the same logits."""
    config = hybrid_config()
    weights = hybrid_weights(config)
    tokens = token_ids(50, seed=4)
    models = [
        load(write_model(tmp_path / "published", config, weights)),
        load(write_model(tmp_path / "converted", config, converted(weights))),
    ]

    first, second = (forced_logits(m, caches_of(m), ROWS[0], tokens, cuts=[20]) for m in models)

    assert error(first, second) < 1e-5


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    """A checkpoint with one layer converted and another one not says two things about its norms."""
    config = hybrid_config()
    weights = hybrid_weights(config)
    name = "model.layers.2.linear_attn.conv1d.weight"
    weights[name] = mx.contiguous(weights[name].swapaxes(1, 2))

    with pytest.raises(InvalidModel) as refused:
        load(write_model(tmp_path, config, weights))

    assert refused.value.field == name


def test_layers_may_come_in_any_order(tmp_path: Path) -> None:
    """`layer_types` says which layer is which, and each gets the cache of its kind."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    folder = write_hybrid(tmp_path, layer_types=kinds, full_attention_interval=None)
    tokens = token_ids(60, seed=5)
    model = load(folder)

    made = [None if cache is None else cache.kind for cache in model.new_caches()]
    whole = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[])
    cut = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[1, 7, 40, 41])

    assert made == [Kind.STANDARD, Kind.RECURRENT, Kind.RECURRENT, Kind.STANDARD]
    assert error(cut, whole) < TOLERANCE


def test_the_heads_of_drafting_stay_unread(tmp_path: Path) -> None:
    """A published checkpoint holds `mtp.*` besides: it loads, and they take no memory."""
    config = hybrid_config()
    weights = hybrid_weights(config)
    plain = load(write_model(tmp_path / "plain", config, weights))
    more = {"mtp.fc.weight": mx.ones((32, 64)), "mtp.norm.weight": mx.ones((32,))}
    more["mtp.layers.0.self_attn.q_proj.weight"] = mx.ones((128, 32))

    model = load(write_model(tmp_path / "more", config, weights | more))

    assert [array.shape for array in model.parameters().values()] == [
        array.shape for array in plain.parameters().values()
    ]


def test_a_ragged_batch_equals_the_peers_rows(tmp_path: Path) -> None:
    """Rows of different lengths and classes, in any order, get the logits of the peer alone."""
    folder = write_hybrid(tmp_path)
    model = load(folder)
    lengths = [3, 250, 300, 20]
    texts = [token_ids(length + 12, seed=length) for length in lengths]
    expected = [peer_logits(folder, text) for text in texts]
    caches = fed(model, texts, lengths)

    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1], [1, 3, 0]]
    reached = list(lengths)
    for step in range(12):
        chosen = orders[step % len(orders)]
        for index in chosen:
            caches.reserve(ROWS[index], tokens=reached[index] + 1)
        batch = Batch.decode(
            [texts[index][reached[index]] for index in chosen],
            [reached[index] for index in chosen],
            [ROWS[index] for index in chosen],
        )
        logits = model.logits(model.forward(batch, caches))
        mx.eval(logits, caches.state())
        for place, index in enumerate(chosen):
            assert error(logits[place], expected[index][reached[index]]) < TOLERANCE
            reached[index] += 1


def test_several_tokens_of_several_rows_equal_one_at_a_time(tmp_path: Path) -> None:
    """A pass over rows of width 3 moves each row's states on by its own three tokens."""
    model = load(write_hybrid(tmp_path))
    lengths = [5, 40, 17]
    texts = [token_ids(length + 6, seed=length) for length in lengths]
    alone = [
        forced_logits(model, caches_of(model), ROWS[0], text, cuts=range(1, len(text)))
        for text in texts
    ]
    caches = fed(model, texts, lengths)

    for chosen in ([2, 0, 1], [1, 2]):
        for index in chosen:
            caches.reserve(ROWS[index], tokens=lengths[index] + 3)
        tokens = [texts[index][lengths[index] : lengths[index] + 3] for index in chosen]
        batch = Batch(
            tokens=mx.array(tokens, dtype=mx.int32),
            offsets=mx.array([lengths[index] for index in chosen], dtype=mx.int32),
            lengths=tuple(lengths[index] + 3 for index in chosen),
            rows=tuple(ROWS[index] for index in chosen),
        )
        logits = model.logits(model.forward(batch, caches)).reshape(len(chosen), 3, -1)
        mx.eval(logits, caches.state())
        for place, index in enumerate(chosen):
            begin = lengths[index]
            assert error(logits[place], alone[index][begin : begin + 3]) < TOLERANCE
            lengths[index] += 3


def greedy(model: Model, prompts: Sequence[Sequence[int]], count: int, *, late: int) -> list[
    list[int]
]:  # fmt: skip
    """Return `count` greedy tokens a prompt; rows join `late` tokens apart and leave when done."""
    caches = caches_of(model)
    outputs: list[list[int]] = [[] for _ in prompts]
    begun = 0
    while any(len(output) < count for output in outputs):
        running = [index for index in range(begun) if len(outputs[index]) < count]
        if begun < len(prompts) and (not running or sum(map(len, outputs)) >= late * begun):
            caches.join(ROWS[begun], tokens=len(prompts[begun]) + count)
            hidden = model.forward(Batch.prefill(prompts[begun], 0, ROWS[begun]), caches)
            outputs[begun].append(chosen_tokens(model, caches, hidden[-1:])[0])
            begun += 1
            continue
        batch = Batch.decode(
            [outputs[index][-1] for index in running],
            [len(prompts[index]) + len(outputs[index]) - 1 for index in running],
            [ROWS[index] for index in running],
        )
        tokens = chosen_tokens(model, caches, model.forward(batch, caches))
        for index, token in zip(running, tokens, strict=True):
            outputs[index].append(token)
            if len(outputs[index]) == count:
                caches.leave(ROWS[index])
    return outputs


def chosen_tokens(model: Model, caches: RowCaches, hidden: mx.array) -> list[int]:
    """Return the likeliest next tokens and evaluate the pass."""
    best = mx.argmax(model.logits(hidden), axis=-1)
    mx.eval(best, caches.state())
    return ints(best)


def test_a_row_says_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    """While rows join and leave around it, a row generates the tokens that it generates alone."""
    model = load(write_hybrid(tmp_path))
    prompts = [token_ids(length, seed=length) for length in (4, 33, 70, 18)]

    together = greedy(model, prompts, 30, late=9)

    assert together == [greedy(model, [prompt], 30, late=0)[0] for prompt in prompts]


def test_a_reused_slot_starts_afresh(tmp_path: Path) -> None:
    """A row in the place of one that left, NaN in its states, gets the logits of a first row."""
    model = load(write_hybrid(tmp_path))
    tokens = token_ids(20, seed=6)
    first = forced_logits(model, caches_of(model), ROWS[0], tokens, cuts=[7])
    caches = caches_of(model)
    caches.join(ROWS[3], tokens=40)  # stays, so that the arena does
    caches.join(ROWS[0], tokens=40)
    place = caches.table.place(ROWS[0])
    for cache in caches.layers:
        if isinstance(cache, RecurrentCache):
            broken = tuple(mx.full(a.shape, math.nan, a.dtype) for a in cache.read(place, 0, 1))
            cache.write(place, 0, 1, broken)
    caches.leave(ROWS[0])

    again = forced_logits(model, caches, ROWS[1], tokens, cuts=[7])

    assert caches.table.place(ROWS[1]) == place
    assert error(again, first) < 1e-6


def test_bfloat16_stays_bfloat16_but_for_the_recurrence(tmp_path: Path) -> None:
    """No scalar or norm widens the rows; the recurrence's state and decays stay float32."""
    folder = write_hybrid(tmp_path)
    model, exact = load(folder, FloatType.BF16), load(folder)
    tokens = token_ids(60, seed=7)
    caches = caches_of(model)
    caches.join(ROWS[0], tokens=60)

    for begin, end in ((0, 40), (40, 41), (41, 60)):
        hidden = model.forward(Batch.prefill(tokens[begin:end], begin, ROWS[0]), caches)
        mx.eval(hidden, caches.state())
        assert hidden.dtype == mx.bfloat16
    recurrent = [cache for cache in caches.layers if isinstance(cache, RecurrentCache)]
    for cache in recurrent:
        tail, state = cache.read(caches.table.place(ROWS[0]), 0, 60)
        assert (tail.dtype, state.dtype) == (mx.bfloat16, mx.float32)
        # Values between those of bfloat16: nothing rounded them on the way.
        assert not mx.array_equal(state, state.astype(mx.bfloat16).astype(mx.float32))
    kept = {array.dtype for name, array in model.parameters().items() if name.endswith("decay")}
    reference = forced_logits(exact, caches_of(exact), ROWS[0], tokens, cuts=[])[-1:]

    assert len(recurrent) == 2
    assert kept == {mx.float32}
    assert error(model.logits(hidden[-1:]), reference) < 0.1


def test_the_footprint_is_what_a_row_takes(tmp_path: Path) -> None:
    """The fit's sums are the very bytes of a row's slots: states once, keys and values a token."""
    folder = write_hybrid(tmp_path)
    sizes = inspect_model(folder).footprint.caches
    caches = [cache for cache in load(folder).new_caches() if cache is not None]

    recurrent = [cache for cache in caches if cache.kind is Kind.RECURRENT]
    standard = [cache for cache in caches if cache.kind is Kind.STANDARD]

    assert sum(cache.slot_nbytes(512) for cache in recurrent) == 4 * sizes.recurrent_values_per_row
    assert sum(cache.slot_nbytes(512) for cache in standard) == 4 * 512 * sizes.kv_values_per_token
    assert len(recurrent) == len(standard) == 2


def peak_of_a_prompt(model: Model, width: int) -> int:
    """Return the bytes that a prefill of `width` tokens takes at its peak, beyond the caches."""
    caches = caches_of(model, rows_max=1)
    caches.join(ROWS[0], tokens=width)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    hidden = model.forward(Batch.prefill(token_ids(width, seed=9), 0, ROWS[0]), caches)
    mx.eval(hidden, caches.state())
    return mx.get_peak_memory() - before


def test_more_layers_do_not_keep_more_activations(tmp_path: Path) -> None:
    """A layer's states are written before the next layers run: what they were made of goes."""
    width = 512
    wide = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "full_attention_interval": 9}
    few, many = (
        load(write_hybrid(tmp_path / str(layers), num_hidden_layers=layers, **wide))
        for layers in (3, 9)
    )
    mixed_nbytes = 4 * width * (2 * 2 * 32 + 4 * 64)

    peaks = [peak_of_a_prompt(model, width) for model in (few, many)]

    assert peaks[1] - peaks[0] < 2 * mixed_nbytes
    footprint = inspect_model(tmp_path / "3").footprint
    assert peaks[0] <= 4 * width * footprint.activation_values_per_token


def test_a_pass_over_a_prompt_is_a_few_large_operations(tmp_path: Path) -> None:
    """The recurrence does not walk token by token: a token more costs less than one operation."""
    model = load(write_hybrid(tmp_path))
    caches = caches_of(model)
    graphs = []
    for row, width in ((ROWS[0], 256), (ROWS[1], 512)):
        caches.join(row, tokens=width)
        hidden = model.forward(Batch.prefill(token_ids(width, seed=8), 0, row), caches)
        path = tmp_path / f"{width}.dot"
        mx.export_to_dot(str(path), hidden)
        graphs.append(path.read_text().count("shape=rectangle"))
        mx.eval(hidden, caches.state())

    assert graphs[1] - graphs[0] < 256 * model.attention.count(None)
    assert not any(math.isnan(value) for value in floats(hidden[-1].astype(mx.float32)))
