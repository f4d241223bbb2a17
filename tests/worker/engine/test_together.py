"""Several prompts in one pass: the values of each alone, in place, and who is not in company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_shared.domain.errors import InternalError
from mlxd_shared.domain.requests import KVFormat, Pooling
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import LayerCache, RowId
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Failed
from mlxd_worker.engine.stepping.chunking import reads_together
from mlxd_worker.models.base import Batch, Capabilities, Model
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.engines import Collected, TinyEngine, engine_on
from tests.support.mlx_memory import live_nbytes
from tests.support.probing import Probe
from tests.support.random_model import write_dense_model, write_latent_model, write_sliding_model
from tests.support.tiny_model import write_tiny_model
from tests.worker.engine.test_loop import prompt_of
from tests.worker.engine.test_scoring import prompt_scores
from tests.worker.tiny import config_with, difference, load, write_model

TOLERANCE = 1e-4
OF_STEPS = 2e-2
"""Where keys are quantised: a value next to the middle of a step may fall to either side."""
NAN_TOKEN = 300
CHUNKS = ((4, 0, 20), (1, 7, 9), (2, 250, 31), (0, 0, 1))
"""Rows, where each stands, and how many tokens it gets."""
STANDING = 3
"""A row that is not in the pass."""


def caches_with(model: Model, kv: KVFormat, *, few_shapes: bool) -> RowCaches:
    """Return caches with all rows where they stand, in two arenas."""
    layers = model.new_caches(kv=kv, context_max=512)
    caches = RowCaches(layers, context_max=512, rows_max=8, bounded_shapes=few_shapes)
    standing = {row: start for row, start, _ in CHUNKS} | {STANDING: 60}
    for number in range(len(standing)):
        row, start = RowId(number), standing[number]
        assert caches.join(row, tokens=start + 31, coming=8)
        if start:
            ids = [(7 * number + i) % 61 for i in range(start)]
            model.forward(Batch.prefill(ids, 0, row), caches)
            mx.eval(caches.state())
    return caches


def write(folder: Path, kind: str) -> Model:
    """Return a random model of a kind."""
    if kind == "latent":
        return load(write_latent_model(folder))
    return load(write_model(folder, config_with(head_dim=32)))


@pytest.mark.parametrize("few_shapes", [False, True], ids=["any", "few"])
@pytest.mark.parametrize(
    ("kind", "kv"),
    [
        ("standard", KVFormat.MODEL),
        ("standard", KVFormat.Q8),
        ("standard", KVFormat.Q4),
        ("latent", KVFormat.MODEL),
    ],
)
def test_chunks_give_together_what_each_gives_alone(
    tmp_path: Path, kind: str, kv: KVFormat, *, few_shapes: bool
) -> None:
    """Hidden rows, and all that the caches hold afterwards, are those of one pass after another:
    of rows in several arenas, some with a beginning, in any order.
    """
    model = write(tmp_path, kind)
    alone, together = (caches_with(model, kv, few_shapes=few_shapes) for _ in range(2))
    assert together.sliceable
    parts = [([(3 * i + row) % 61 for i in range(n)], at, RowId(row)) for row, at, n in CHUNKS]
    expected = []
    for part in parts:
        expected.append(model.forward(Batch.prefill(*part), alone))
        mx.eval(expected[-1], alone.state())

    hidden = model.forward(Batch.chunks(parts), together)
    mx.eval(hidden, together.state())

    tolerance = TOLERANCE if kv is KVFormat.MODEL else OF_STEPS
    assert difference(mx.concatenate(expected, axis=0), hidden) < tolerance
    for row, at, count in CHUNKS:
        assert together.contents.offset(RowId(row)) == at + count
        for one, other in zip(
            read_all(alone, row, at + count), read_all(together, row, at + count), strict=True
        ):
            assert difference(one, other) < tolerance
    for one, other in zip(
        read_all(alone, STANDING, 60), read_all(together, STANDING, 60), strict=True
    ):
        assert mx.array_equal(one, other).item(), "nobody else's entries are touched"


def read_all(caches: RowCaches, number: int, stop: int) -> list[mx.array]:
    """Return all that the layers hold of a row, quantised or not, as numbers."""
    place = caches.table.place(RowId(number))
    return [
        part.astype(mx.float32)
        for layer in caches.layers
        if layer is not None
        for part in layer.read(place, 0, stop)
        if part.dtype != mx.uint32  # of packed integers a step is the scales' affair
    ]


@pytest.mark.parametrize(
    ("kind", "kv"),
    [
        ("standard", KVFormat.MODEL),
        ("standard", KVFormat.Q8),
        ("latent", KVFormat.MODEL),
    ],
)
def test_chunks_are_written_in_place(tmp_path: Path, kind: str, kv: KVFormat) -> None:
    """A pass over several prompts needs much less than one arena's keys: nothing is copied, also
    where chunks of one arena are attended in several calls.
    """
    model = write(tmp_path, kind)
    caches = RowCaches(model.new_caches(kv=kv, context_max=8192), context_max=8192, rows_max=64)
    for number in range(6):
        assert caches.join(RowId(number), tokens=4000, coming=64)
    largest = max(array.nbytes for array in caches.arrays().values())
    before = live_nbytes()

    counts = {5: 3, 1: 20, 2: 4}
    batch = Batch.chunks([([4] * n, 0, RowId(number)) for number, n in counts.items()])
    mx.eval(model.forward(batch, caches), caches.state())

    assert mx.get_peak_memory() - before < largest / 2


def layer(*, window: int | None = None, kv: KVFormat = KVFormat.MODEL) -> LayerCache:
    """Return an empty cache of attention."""
    geometry = AttentionGeometry(1, 32, window=window)
    return geometry.new_cache(mx.float32, kv=kv, context_max=512)


@pytest.mark.parametrize(
    ("second", "together"),
    [
        (layer(), True),
        (layer(kv=KVFormat.Q8), True),
        (AttentionGeometry(1, 32, latent_dim=16).new_cache(
            mx.float32, kv=KVFormat.MODEL, context_max=512), True),
        (layer(window=64), False),
        (RecurrentCache([RowState("tail", (3, 4), mx.float32)]), False),
        (None, False),
    ],
    ids=["standard", "quantised", "latent", "sliding", "recurrent", "nothing"],
)  # fmt: skip
def test_only_what_keeps_every_position_is_read_together(
    second: LayerCache | None, *, together: bool
) -> None:
    """One other layer and prompts are read one by one; so they are by a model that says nothing."""
    caches = RowCaches([layer(), second], context_max=512, rows_max=4)

    assert reads_together(Capabilities(reads_chunks=True), caches) is together
    assert not reads_together(Capabilities(), caches)


class Counted(Probe):
    """The model it is given, which notes the tokens of each row of every pass over prompts."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        able = inner.capabilities
        self.capabilities = replace(self.capabilities, reads_chunks=able.reads_chunks)
        self._model = inner
        self.passes: list[tuple[int, ...]] = []

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Run the model."""
        if batch.counts or batch.width > 1:
            self.passes.append(batch.counts or (batch.width,))
        return self._model.forward(batch, caches)


def serving(
    folder: Path, *, chunk: int = 512, context_length: int = 512, prefix_nbytes: int = 0
) -> tuple[TinyEngine, Counted]:
    """Return an engine on the model in `folder`, and what it runs."""
    model = Counted(load(folder))
    tiny = engine_on(
        model,
        load_tokenizer(folder),
        rows_max=16,
        context_length=context_length,
        chunk=chunk,
        clock=lambda: 1.0,
        prefix_nbytes=prefix_nbytes,
    )
    return tiny, model


def alone_of(tiny: TinyEngine, prompts: Sequence[Sequence[int]], **options: int) -> list[list[int]]:
    """Return each prompt's own tokens."""
    return [tiny.alone(prompt, **options).ids for prompt in prompts]


@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (write_dense_model, [(15,) * 12]),
        (write_latent_model, [(15,) * 12]),
        (lambda folder: write_sliding_model(folder, window=32, mixed=True), [(15,)] * 12),
    ],
    ids=["standard", "latent", "windows"],
)
def test_a_burst_of_short_prompts_is_one_pass(
    tmp_path: Path, make: Callable[[Path], Path], passes: list[tuple[int, ...]]
) -> None:
    """And each has the tokens of its lone run; where layers slide each has a pass of its own."""
    tiny, model = serving(make(tmp_path))
    prompts = [prompt_of(number, 16) for number in range(12)]
    sinks = [tiny.submit(prompt, max_tokens=12)[1] for prompt in prompts]
    tiny.engine.step()

    assert model.passes == passes
    assert all(len(sink.ids) == 1 for sink in sinks)
    tiny.run()
    assert [sink.ids for sink in sinks] == alone_of(tiny, prompts, max_tokens=12)


def test_prompts_of_any_lengths_go_together(tmp_path: Path) -> None:
    """Those that end, shortest first, and a chunk of one that does not."""
    tiny, model = serving(write_tiny_model(tmp_path), chunk=160)
    prompts = [prompt_of(number, length) for number, length in enumerate((2, 31, 12, 200, 60))]
    sinks = [tiny.submit(prompt, max_tokens=8)[1] for prompt in prompts]
    tiny.engine.step()

    assert model.passes == [(1, 11, 30, 59, 59)]
    tiny.run()
    assert [sink.ids for sink in sinks] == alone_of(tiny, prompts, max_tokens=8)


def test_a_known_beginning_is_read_by_nobody(tmp_path: Path) -> None:
    """Rows that stand at different offsets, of which some was kept, are read together."""
    tiny, model = serving(write_tiny_model(tmp_path), prefix_nbytes=1 << 30)
    beginnings = [prompt_of(number, 100 + 9 * number) for number in range(2)]
    for beginning in beginnings:
        tiny.alone(beginning, max_tokens=2)
    prompts = [
        (*beginnings[0], *prompt_of(5, 20)),
        (*beginnings[1], *prompt_of(6, 30)),
        prompt_of(7, 9),
    ]
    model.passes.clear()
    sinks = [tiny.submit(prompt, max_tokens=8)[1] for prompt in prompts]
    tiny.engine.step()

    assert len(model.passes) == 1
    assert sorted(model.passes[0]) == [8, 19, 29]
    tiny.run()
    cold, _ = serving(tmp_path)
    assert [sink.ids for sink in sinks] == alone_of(cold, prompts, max_tokens=8)


def test_who_leaves_in_the_middle_of_a_prompt_harms_nobody(tmp_path: Path) -> None:
    """Cancelled between two passes in company; the next prompt takes its place."""
    tiny, model = serving(write_tiny_model(tmp_path), chunk=64)
    prompts = [prompt_of(number, 90) for number in range(3)]
    requests = [tiny.submit(prompt, max_tokens=8) for prompt in prompts]
    for _ in range(2):
        tiny.engine.step()
    assert model.passes == [(64,), (25, 39)]
    tiny.engine.cancel(requests[1][0].stream)
    _, late = tiny.submit(prompt_of(9, 40), max_tokens=8)
    tiny.run()

    sinks = [requests[0][1], requests[2][1], late]
    others = [prompts[0], prompts[2], prompt_of(9, 40)]
    assert [sink.ids for sink in sinks] == alone_of(tiny, others, max_tokens=8)
    assert tiny.caches.rows == ()


def test_a_prompt_without_numbers_fails_alone(tmp_path: Path) -> None:
    """What is no number stays in its row, in products, in attention and in what is kept."""
    tiny, model = serving(write_tiny_model(tmp_path, nan_token=NAN_TOKEN), prefix_nbytes=1 << 30)
    prompts = [prompt_of(number, 20) for number in range(4)]
    sinks = [tiny.submit(prompt, max_tokens=8)[1] for prompt in prompts[:2]]
    _, bad = tiny.submit((*prompt_of(8, 10), NAN_TOKEN, *prompt_of(9, 5)))
    sinks += [tiny.submit(prompt, max_tokens=8)[1] for prompt in prompts[2:]]
    tiny.engine.step()

    assert model.passes == [(15, 19, 19, 19, 19)]
    (event,) = bad.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, InternalError)
    tiny.run()
    cold, _ = serving(tmp_path)
    assert [sink.ids for sink in sinks] == alone_of(cold, prompts, max_tokens=8)


def vector_of(sink: Collected) -> mx.array:
    """Return the vector that a stream ended with."""
    return mx.array(sink.finished.embedding)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.LAST_TOKEN])
def test_vectors_are_made_in_company(tmp_path: Path, pooling: Pooling) -> None:
    """Each prompt's states become its own vector; others beside it generate."""
    tiny, model = serving(write_tiny_model(tmp_path))
    texts = [prompt_of(1, 9), prompt_of(2, 30)]
    sinks = [tiny.submit(text, pooling=pooling)[1] for text in texts]
    _, other = tiny.submit(prompt_of(3, 12), max_tokens=5)
    tiny.run()

    assert sorted(model.passes[0]) == [9, 11, 30]
    for text, sink in zip(texts, sinks, strict=True):
        assert difference(vector_of(sink), vector_of(tiny.alone(text, pooling=pooling))) < TOLERANCE
    assert other.ids == tiny.alone(prompt_of(3, 12), max_tokens=5).ids


def test_prompts_are_scored_in_company(tmp_path: Path) -> None:
    """Each prompt's tokens have the log-probabilities of a pass of its own."""
    tiny, model = serving(write_tiny_model(tmp_path))
    texts = [prompt_of(1, 20), prompt_of(2, 41)]
    _, other = tiny.submit(prompt_of(3, 12), max_tokens=5)
    sinks = [tiny.submit(text, prompt_logprobs=1)[1] for text in texts]
    tiny.run()

    assert sorted(model.passes[0]) == [11, 19, 40]
    for text, sink in zip(texts, sinks, strict=True):
        ours, own = (prompt_scores(its) for its in (sink, tiny.alone(text, prompt_logprobs=1)))
        assert [one.chosen.token_id for one in ours] == list(text[1:])
        for one, alone in zip(ours, own, strict=True):
            assert one.chosen.logprob == pytest.approx(alone.chosen.logprob, abs=1e-3)
    assert other.ids == tiny.alone(prompt_of(3, 12), max_tokens=5).ids
