"""Passes over tokens in one arena: the model's own results, whoever joins, leaves and reads what.

Kernels that write in place exist on a GPU alone. Here a cache does what they do in MLX's own
operations, so that all that stands around them is what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.sizes.arena_sizes import slot_sizes
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.tokens import (
    READS_MAX,
    TOKEN_SIZES,
    fill,
    is_read_in_place,
    lay_tokens,
    size_of,
)
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.engine.warm_up import warm_shapes
from mlxd_worker.models.base import Batch, Model, Passes
from tests.support.probing import Probe
from tests.worker.in_place import InPlace, compiled_in_place
from tests.worker.tiny import config_with, difference, load, write_model

CONTEXT = 1024
ROWS_MAX = 8
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def _traced_each_time() -> Iterator[None]:
    """Run what would be compiled as it is written: a CPU's compiler is not what is tested."""
    mx.disable_compile()
    yield
    mx.enable_compile()


class Pair:
    """A model over arenas by class, and its double in place, fed alike."""

    def __init__(self, model: Model, *, rows_max: int = ROWS_MAX) -> None:
        self.plain_caches = RowCaches(
            model.new_caches(context_max=CONTEXT),
            context_max=CONTEXT,
            rows_max=rows_max,
            bounded_shapes=True,
        )
        self.plain: Passes = model
        self.compiled, self.caches = compiled_in_place(
            model, context_max=CONTEXT, rows_max=rows_max
        )
        self.offsets: dict[RowId, int] = {}

    def join(self, number: int, room: int) -> RowId:
        """Let a row join both."""
        row = RowId(number)
        self.offsets[row] = 0
        for caches in (self.plain_caches, self.caches):
            assert caches.join(row, tokens=room)
        return row

    def leave(self, row: RowId, *, sound: bool = True) -> None:
        """Let a row leave both."""
        del self.offsets[row]
        for caches in (self.plain_caches, self.caches):
            caches.leave(row, sound=sound)

    def read(self, tokens: dict[RowId, int]) -> float:
        """Let rows read their next tokens in one pass; return by how much the results differ."""
        chunks = []
        for row, count in tokens.items():
            start = self.offsets[row]
            ids = [(7 * row + 3 * at) % 61 for at in range(start, start + count)]
            chunks.append((ids, start, row))
            self.offsets[row] = start + count
        alone = len(chunks) == 1
        batch = Batch.prefill(*chunks[0]) if alone else Batch.chunks(chunks)
        return self._both(batch)

    def step(self, rows: Sequence[RowId]) -> float:
        """Decode a token of each row; return by how much the results differ."""
        offsets = [self.offsets[row] for row in rows]
        tokens = [(5 * row + at) % 61 for row, at in zip(rows, offsets, strict=True)]
        for row in rows:
            self.offsets[row] += 1
        return self._both(Batch.decode(tokens, offsets, rows))

    def _both(self, batch: Batch) -> float:
        results = []
        for model, caches in ((self.plain, self.plain_caches), (self.compiled, self.caches)):
            caches.reserve_all(dict(zip(batch.rows, batch.lengths, strict=True)))
            hidden = model.forward(batch, caches)
            mx.eval(hidden, caches.state())
            results.append(hidden)
        assert results[0].shape == results[1].shape
        return difference(*results)


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with(head_dim=32)))


def test_passes_over_tokens_give_what_the_models_own_passes_give(model: Model) -> None:
    """Prompts alone and together, of any length, and steps of any rows, joining and leaving."""
    pair = Pair(model)
    rows = [pair.join(number, 300) for number in range(5)]

    assert pair.read({rows[0]: 40}) < CLOSE
    assert pair.read({rows[1]: 3, rows[2]: 70, rows[3]: 1}) < CLOSE
    assert pair.step([rows[2], rows[0], rows[1]]) < CLOSE
    assert pair.read({rows[4]: 200, rows[0]: 17}) < CLOSE
    assert pair.step(rows) < CLOSE
    pair.leave(rows[1])
    newcomer = pair.join(9, 500)
    assert pair.read({newcomer: 129}) < CLOSE
    assert pair.step([newcomer]) < CLOSE
    assert pair.step([rows[4], newcomer, rows[2]]) < CLOSE


def test_rows_in_place_never_move_and_need_no_wait(model: Model) -> None:
    """One arena holds all rows at full length, and a place that is free again is not written."""
    pair = Pair(model)
    first = pair.join(0, 2)
    pair.read({first: 2})
    arrays = pair.caches.state()
    pair.leave(first)
    again = [pair.join(number, CONTEXT) for number in range(1, ROWS_MAX + 1)]

    (arena,) = pair.caches.table.arenas
    assert (arena.capacity, arena.slots) == (CONTEXT, ROWS_MAX)
    assert not pair.caches.table.tend()
    assert all(one is other for one, other in zip(pair.caches.state(), arrays, strict=True))
    assert pair.read({again[0]: 9}) < CLOSE


def test_a_place_whose_row_held_no_numbers_is_cleared_for_the_next(model: Model) -> None:
    """Else a longer prompt's products would meet what is no number behind their masks."""
    pair = Pair(model)
    row = pair.join(0, 300)
    pair.read({row: 4})
    layer = pair.caches.layers[0]
    assert isinstance(layer, InPlace)
    place = pair.caches.table.place(row)
    keys, values = layer.lend(place.arena)
    values[place.slot, :, 200] = mx.nan
    layer.settle(place.arena, [keys, values])
    pair.leave(row, sound=False)

    after = pair.join(1, 300)

    assert not any(mx.isnan(array).any() for array in pair.caches.arrays().values())
    assert pair.read({after: 100}) < CLOSE


class Watched(Probe):
    """A model whose passes are traced up to some number of tokens; notes those that are its own."""

    def __init__(self, inner: Model, *, most: int) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, flat_tokens_max=most)
        self.own: list[int] = []

    def forward(self, batch: Batch, caches: Any) -> mx.array:
        """Note a pass over rows, not over flat tokens."""
        if isinstance(caches, RowCaches) and caches.in_place:
            self.own.append(batch.tokens.size)
        return super().forward(batch, caches)


@pytest.mark.parametrize(
    ("most", "own"), [(TOKEN_SIZES[-1], []), (64, [65, 130]), (0, [64, 65, 130])]
)
def test_what_a_model_does_not_trace_is_its_own_pass(
    model: Model, most: int, own: list[int]
) -> None:
    """One of packed weights unpacks them for many tokens, a few layers at a time; steps are traced
    whatever it says.
    """
    watched = Watched(model, most=most)
    pair = Pair(watched)
    rows = [pair.join(number, 300) for number in range(3)]

    assert pair.read({rows[0]: 64}) < CLOSE
    assert pair.read({rows[1]: 1, rows[2]: 1}) < CLOSE
    assert pair.read({rows[1]: 65}) < CLOSE
    assert pair.read({rows[0]: 70, rows[2]: 60}) < CLOSE
    assert pair.step(rows) < CLOSE
    assert watched.own == own


def test_long_prompts_are_read_by_products_within_what_they_have(model: Model) -> None:
    """Beyond what a kernel should read a pass takes the model's own way, over a class's span."""
    pair = Pair(model, rows_max=2)
    row = pair.join(0, CONTEXT)
    assert pair.read({row: 800}) < CLOSE
    plan = pair.caches.plan(
        (row,), offsets=mx.array([800]), lengths=(900,), width=100, dtype=model.dtype
    )

    assert plan.chunk is not None
    assert plan.chunk.span == CONTEXT
    assert READS_MAX < 800 * 800


@pytest.mark.parametrize(
    ("lengths", "counts", "able"),
    [
        ([512], [512], True),
        ([1024], [512], False),
        ([1280, 9000], [256, 1], True),
        ([2048, 9000], [256, 1], False),
        ([2128], [128], True),
        ([50_000], [8], True),
        ([512, 512, 512], [512, 512, 512], False),
        ([1 << 20, 1 << 20], [1, 1], True),
    ],
)
def test_what_products_read_faster_is_not_read_in_place(
    lengths: list[int], counts: list[int], *, able: bool
) -> None:
    """A long chunk far into its row, and what is too much in sum; steps of one token always are."""
    assert is_read_in_place(lengths, counts, most=TOKEN_SIZES[-1]) is able


def test_a_pass_has_one_of_few_numbers_of_tokens(model: Model) -> None:
    """What is left over is a copy of one of the pass's own tokens, the one that reads least."""
    assert [size_of(count, TOKEN_SIZES) for count in (1, 64, 65, 2048, 2049)] == [
        64, 64, 128, 2048, None,
    ]  # fmt: skip
    assert fill(3, 5, 1) == [0, 1, 2, 1, 1]
    pair = Pair(model)
    rows = [pair.join(number, 64) for number in range(2)]
    places = [pair.caches.table.place(row) for row in rows]

    layout = lay_tokens(places, (40, 6), (3, 2), slots=ROWS_MAX, most=64)

    assert lay_tokens(places, (40, 6), (3, 2), slots=ROWS_MAX, most=63) is None, "with copies 64"
    assert layout is not None
    assert layout.source is not None
    assert mx.array_equal(layout.positions[:6], mx.array([37, 38, 39, 4, 5, 4]))
    assert mx.all(layout.source[5:] == 3)
    assert mx.all(layout.slots[5:] == places[1].slot)


def test_all_numbers_of_tokens_are_run_before_ready(model: Model) -> None:
    """Then no request compiles a pass of its own."""
    pair = Pair(model)
    warm_shapes(model, pair.caches, compiled=pair.compiled)
    steps = pair.compiled.steps
    assert pair.caches.rows == ()

    rows = [pair.join(number, 300) for number in range(5)]
    for count in (1, 40, 100):
        pair.read({rows[0]: count})
    pair.read({rows[1]: 5, rows[2]: 150})
    for many in (1, 2, 3, 5):
        pair.step(rows[:many])

    assert pair.compiled.steps == steps


class Heads(CompiledModel):
    """Notes how many rows it has logits made of."""

    def __init__(self, pair: Pair, model: Model) -> None:
        super().__init__(model, pair.caches)
        self.capabilities = pair.compiled.capabilities
        self.counts: set[int] = set()

    def logits(self, hidden: mx.array) -> mx.array:
        """Note the rows."""
        self.counts.add(hidden.shape[0])
        return super().logits(hidden)


def test_a_step_s_logits_are_made_of_each_number_of_rows_before_ready(model: Model) -> None:
    """A head's kernel may be one for few rows and another for many."""
    pair = Pair(model)
    heads = Heads(pair, model)

    warm_shapes(model, pair.caches, compiled=heads)

    assert heads.counts >= set(slot_sizes(ROWS_MAX))
