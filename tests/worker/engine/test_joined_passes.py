"""A prompt's tokens in a decode step's pass: the same values, in place, and one pass for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.prefilling import JOINED_PROMPTS_MAX, JOINED_TOKENS
from mlxd_worker.engine.request import Failed
from mlxd_worker.engine.stepping.choose import choose
from mlxd_worker.models.base import Batch, Passes
from mlxd_worker.models.families.llama import LlamaModel
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.engines import TinyEngine, engine_on
from tests.support.mlx_memory import live_nbytes
from tests.support.probing import Probe
from tests.support.tiny_model import write_tiny_model
from tests.worker.engine.test_loop import prompt_of
from tests.worker.engine.test_order import Faulty
from tests.worker.tiny import caches_of, config_with, difference, load, write_model

TOLERANCE = 1e-4
SLIDING = {"architectures": ["MistralForCausalLM"], "sliding_window": 300}
DECODING, JOINING = (RowId(1), RowId(2), RowId(3)), (RowId(4), RowId(5))
LENGTHS = (5, 250, 300)
CHUNKS = ((0, 20), (7, 9))
"""Where each joining row stands, and how many tokens it gets."""


@dataclass(slots=True)
class Stand:
    """A model with rows that decode and rows in their prefill."""

    model: LlamaModel
    caches: RowCaches

    def ready(self) -> None:
        """Bring all rows to where they stand."""
        begun = [*zip(DECODING, LENGTHS, strict=True)]
        begun += [(row, at) for row, (at, _) in zip(JOINING, CHUNKS, strict=True)]
        for row, length in begun:
            assert self.caches.join(row, tokens=max(length + 40, 1), coming=8)
            if length:
                ids = [(7 * row + i) % 61 for i in range(length)]
                self.model.forward(Batch.prefill(ids, 0, row), self.caches)
                mx.eval(self.caches.state())

    def decode(self) -> Batch:
        """Return the decode step's batch."""
        return Batch.decode([11, 12, 13], list(LENGTHS), list(DECODING))

    def chunks(self) -> list[Batch]:
        """Return the prompts' batches."""
        return [
            Batch.prefill(list(range(at, at + count)), at, row)
            for row, (at, count) in zip(JOINING, CHUNKS, strict=True)
        ]


def joining(folder: Path) -> LlamaModel:
    """Return the model in `folder`, whose passes can be joined."""
    model = load(folder)
    assert isinstance(model, LlamaModel)
    return model


def stand(folder: Path) -> Stand:
    """Return a random model with all rows where they stand."""
    model = joining(write_model(folder, config_with()))
    rig = Stand(model, caches_of(model))
    rig.ready()
    return rig


def test_passes_give_joined_what_they_give_apart(tmp_path: Path) -> None:
    """Hidden rows, and what the caches hold afterwards, are those of one pass after another."""
    apart, joined = stand(tmp_path), stand(tmp_path)
    batches = [apart.decode(), *apart.chunks()]
    expected = []
    for batch in batches:
        expected.append(apart.model.forward(batch, apart.caches))
        mx.eval(expected[-1], apart.caches.state())

    outputs = joined.model.forward_joined([joined.decode(), *joined.chunks()], joined.caches)
    mx.eval(outputs, joined.caches.state())

    for one, other in zip(expected, outputs, strict=True):
        assert one.shape == other.shape
        assert difference(one, other) < TOLERANCE
    for name, array in apart.caches.arrays().items():
        assert difference(array, joined.caches.arrays()[name]) < TOLERANCE


def test_joined_passes_write_in_place(tmp_path: Path) -> None:
    """A joined pass needs much less than one arena's keys: nothing is copied."""
    config = config_with(max_position_embeddings=8192)
    model = joining(write_model(tmp_path, config))
    rig = Stand(model, RowCaches(model.new_caches(), context_max=8192, rows_max=64))
    for row in (*DECODING, *JOINING):
        assert rig.caches.join(row, tokens=4000, coming=64)
    one_array = next(iter(rig.caches.arrays().values())).nbytes
    before = live_nbytes()

    batches = [
        Batch.decode([1, 2, 3], [0, 0, 0], list(DECODING)),
        *[Batch.prefill([4, 5, 6], 0, row) for row in JOINING],
    ]
    hidden = rig.model.forward_joined(batches, rig.caches)
    mx.eval(hidden, rig.caches.state())

    assert mx.get_peak_memory() - before < one_array / 2


def joins(model: Passes, caches: RowCaches) -> bool:
    """Tell whether the stepper chosen for them takes prompts along."""
    return choose(model, caches).joins


def test_only_standard_caches_join(tmp_path: Path) -> None:
    """Passes are joined where every layer keeps all keys as they are, and shapes may be any."""
    model = load(write_model(tmp_path, config_with()))
    context = model.context_max
    plain = RowCaches(model.new_caches(), context_max=context, rows_max=4)
    few = RowCaches(model.new_caches(), context_max=context, rows_max=4, bounded_shapes=True)

    assert joins(model, plain)
    assert not joins(model, few)
    assert not joins(Probe(model), plain), "a model that does not say so"
    windowed = load(write_model(tmp_path / "w", config_with(**SLIDING)))
    assert not joins(windowed, caches_of(windowed))


class Counted(Probe):
    """The model it is given, which notes the widths of every pass."""

    def __init__(self, inner: LlamaModel) -> None:
        super().__init__(inner)
        joins = inner.capabilities.joins_passes
        self.capabilities = replace(self.capabilities, joins_passes=joins)
        self._model = inner
        self.passes: list[tuple[int, ...]] = []

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Run the model."""
        self.passes.append((batch.width,))
        return self._model.forward(batch, caches)

    def forward_joined(self, batches: Sequence[Batch], caches: PassCaches) -> list[mx.array]:
        """Run the model."""
        self.passes.append(tuple(batch.width for batch in batches))
        return self._model.forward_joined(batches, caches)


def count_passes(folder: Path) -> tuple[TinyEngine, Counted]:
    """Return an engine on a clock that stands still, so that little ever seems to wait."""
    write_tiny_model(folder)
    model = Counted(joining(folder))
    tokenizer = load_tokenizer(folder)
    tiny = engine_on(model, tokenizer, rows_max=8, context_length=512, clock=lambda: 1.0)
    return tiny, model


def test_a_prompt_goes_along_with_the_steps_of_others(tmp_path: Path) -> None:
    """While a row decodes a prompt has a few tokens in each of its passes, the last one and the
    draw after it among them; both get the tokens of their lone runs.
    """
    tiny, model = count_passes(tmp_path)
    first, second = prompt_of(1, 3), prompt_of(2, 2 * JOINED_TOKENS + 8)
    _, one = tiny.submit(first, max_tokens=30)
    tiny.engine.step()
    _, other = tiny.submit(second, max_tokens=30)
    model.passes.clear()
    for _ in range(3):
        tiny.engine.step()

    assert model.passes == [(1, JOINED_TOKENS), (1, JOINED_TOKENS), (1, 8)]
    assert (len(one.ids), len(other.ids)) == (4, 1)
    tiny.run()
    assert one.ids == tiny.alone(first, max_tokens=30).ids
    assert other.ids == tiny.alone(second, max_tokens=30).ids


def test_several_short_prompts_go_along_together(tmp_path: Path) -> None:
    """Prompts share what a pass takes along, up to so many."""
    tiny, model = count_passes(tmp_path)
    tiny.submit(prompt_of(1, 3), max_tokens=30)
    tiny.engine.step()
    prompts = [prompt_of(number, 4) for number in range(2, 7)]
    sinks = [tiny.submit(prompt, max_tokens=5)[1] for prompt in prompts]
    model.passes.clear()
    tiny.engine.step()

    assert model.passes == [(1, *(4,) * JOINED_PROMPTS_MAX)]
    tiny.run()
    assert [sink.ids for sink in sinks] == [tiny.alone(p, max_tokens=5).ids for p in prompts]


def test_a_row_that_cannot_begin_fails_alone(tmp_path: Path) -> None:
    """Where the first draw of a prompt cannot be made up, the others' step goes on."""
    tiny, _ = count_passes(tmp_path)
    _, good = tiny.submit(prompt_of(1, 3), max_tokens=6)
    tiny.engine.step()
    _, bad = tiny.submit(prompt_of(2, 6), min_tokens=Faulty(0))
    tiny.engine.step()

    assert isinstance(bad.events[-1], Failed)
    assert (len(good.ids), len(tiny.caches.rows)) == (2, 1)
    tiny.run()
    assert good.ids == tiny.alone(prompt_of(1, 3), max_tokens=6).ids
