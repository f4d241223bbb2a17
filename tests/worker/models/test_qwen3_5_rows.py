"""A Qwen3.5's rows: in batches, in slots that others had, in engines; and what a pass takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlxd_models.sizes.cache_sizes import RECURRENT_STEP_LAYERS
from mlxd_worker.cache.layers.recurrent import RecurrentCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model
from tests.support.engines import tiny_engine
from tests.support.mlx_memory import live_nbytes
from tests.support.random_model import LARGE, write_hybrid_model
from tests.worker.hybrid import (
    ROWS,
    TOLERANCE,
    error,
    feed,
    peer_logits,
    token_ids,
    write_hybrid,
)
from tests.worker.tiny import caches_of, floats, forced_logits, ints, load

RECKONED_PART_MIN = 0.97
"""So much of what is taken is reckoned at least; how far MLX runs ahead is a matter of timing."""
TRIES = 60


def test_a_ragged_batch_equals_the_peers_rows(tmp_path: Path) -> None:
    """Rows of different lengths and classes, in any order, get the logits of the peer alone."""
    folder = write_hybrid(tmp_path)
    model = load(folder)
    lengths = [3, 250, 300, 20]
    texts = [token_ids(length + 12, seed=length) for length in lengths]
    expected = [peer_logits(folder, text) for text in texts]
    caches = feed(model, texts, lengths)

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
    caches = feed(model, texts, lengths)

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


def test_an_engines_chunks_do_not_change_what_is_said(tmp_path: Path) -> None:
    """One prompt in chunks of 7 and of 64 has the same greedy text, with other rows beside it."""
    folder = write_hybrid_model(tmp_path)
    prompts = [token_ids(length, seed=length, vocab=200) for length in (150, 31, 90)]
    said = []
    for chunk in (7, 64):
        engine = tiny_engine(folder, chunk=chunk)
        sinks = [engine.submit(prompt, max_tokens=40)[1] for prompt in prompts]
        engine.run()
        said.append([sink.ids for sink in sinks])

    assert said[0] == said[1]
    assert said[0][0] == tiny_engine(folder).alone(prompts[0], max_tokens=40).ids
    assert [len(ids) for ids in said[0]] == [40, 40, 40]


def peak_of_a_prompt(model: Model, width: int) -> int:
    """Return the bytes that a prefill of `width` tokens takes at its peak, beyond the caches."""
    caches = caches_of(model, rows_max=1)
    caches.join(ROWS[0], tokens=width)
    before = live_nbytes()
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

    # How far the evaluator runs ahead is a matter of timing, so more layers are tried until they
    # need no more; where each kept what it had made, no try would.
    least = min(peak_of_a_prompt(few, width) for _ in range(6))
    most = least + 4 * mixed_nbytes
    assert any(peak_of_a_prompt(many, width) < most for _ in range(TRIES))
    footprint = inspect_model(tmp_path / "3").footprint
    bound = footprint.passes.nbytes(
        footprint.caches, context=width, rows=1, item_nbytes=4, on_cpu=True
    )
    assert least * RECKONED_PART_MIN <= bound


def test_a_step_replaces_states_within_what_the_fit_counts(tmp_path: Path) -> None:
    """However many layers: rows hold their own states only, and a step, its batch as before or
    changed, no more beside them than those of a few layers."""
    wide = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "full_attention_interval": 100}
    folder = write_hybrid(tmp_path, num_hidden_layers=12, **wide)
    sizes = inspect_model(folder).footprint.caches
    model, rows = load(folder), ROWS
    caches = caches_of(model, rows_max=len(rows))
    for row in rows:
        caches.join(row, tokens=100)
        hidden = model.forward(Batch.prefill(token_ids(8, seed=1), 0, row), caches)
        mx.eval(hidden, caches.state())
    states_nbytes = 4 * len(rows) * sizes.recurrent_values_per_row
    spare_nbytes = states_nbytes // sizes.recurrent_layers * RECURRENT_STEP_LAYERS

    orders = [rows, rows, rows[::-1], rows[::-1], rows[:3], rows[:3]]
    for step, order in enumerate(orders):
        before = live_nbytes()
        batch = Batch.decode([1] * len(order), [8 + step] * len(order), order)
        mx.eval(model.forward(batch, caches), caches.state())
        assert caches.nbytes == states_nbytes
        assert mx.get_peak_memory() - before <= spare_nbytes


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

    assert graphs[1] - graphs[0] < 256 * len(model.attention)
    assert not any(math.isnan(value) for value in floats(hidden[-1].astype(mx.float32)))


def test_the_large_hybrid_model_is_large(tmp_path: Path) -> None:
    """The model for timings holds 100 MB of float32 weights at least, by its headers."""
    files = inspect_model(write_hybrid_model(tmp_path, shape=LARGE))

    assert 4 * files.weight_values >= 100_000_000
    assert files.footprint.caches.recurrent_values_per_row > 0
