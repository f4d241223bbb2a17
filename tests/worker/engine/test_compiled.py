"""The decode step as one function by slots: the same results, whoever sits where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Batch, Capabilities, Model, Passes
from tests.support.probing import Probe
from tests.worker.tiny import config_with, difference, load, write_model

CONTEXT = 1024
PLAIN = KVFormat.MODEL
ROWS_MAX = 8


@pytest.fixture(autouse=True)
def _traced_each_time() -> Iterator[None]:
    """Run what would be compiled as it is written: a CPU's compiler is not what is tested."""
    mx.disable_compile()
    yield
    mx.enable_compile()


class Pair:
    """A model and its compiled double, each with caches of its own, fed alike."""

    def __init__(self, model: Model, kv: KVFormat = KVFormat.MODEL) -> None:
        self.plain_caches, self.caches = (
            RowCaches(
                model.new_caches(kv=kv, context_max=CONTEXT),
                context_max=CONTEXT,
                rows_max=ROWS_MAX,
                bounded_shapes=True,
            )
            for _ in range(2)
        )
        self.plain: Passes = model
        self.compiled = CompiledModel(model, self.caches)
        self.offsets: dict[RowId, int] = {}

    def join(self, number: int, tokens: int, *, room: int | None = None) -> RowId:
        """Let a row join both and read `tokens` tokens; it has room for `room`."""
        row = RowId(number)
        self.offsets[row] = 0
        for caches in (self.plain_caches, self.caches):
            assert caches.join(row, tokens=room or tokens)
        self.read(row, tokens)
        return row

    def read(self, row: RowId, tokens: int) -> None:
        """Let a row read a prompt's next tokens."""
        start = self.offsets[row]
        ids = [(7 * row + 3 * p) % 61 for p in range(start, start + tokens)]
        for model, caches in ((self.plain, self.plain_caches), (self.compiled, self.caches)):
            model.forward(Batch.prefill(ids, start, row), caches)
            mx.eval(caches.state())
        self.offsets[row] = start + tokens

    def leave(self, row: RowId) -> None:
        """Let a row leave both."""
        del self.offsets[row]
        for caches in (self.plain_caches, self.caches):
            caches.leave(row)

    def step(self, rows: Sequence[RowId]) -> float:
        """Decode a token of each row on both; return by how much the hidden rows differ."""
        tokens = [(5 * row + self.offsets[row]) % 61 for row in rows]
        offsets = [self.offsets[row] for row in rows]
        hidden_states = []
        for model, caches in ((self.plain, self.plain_caches), (self.compiled, self.caches)):
            caches.reserve_all({row: self.offsets[row] + 1 for row in rows})
            hidden = model.forward(Batch.decode(tokens, offsets, rows), caches)
            mx.eval(hidden, caches.state())
            hidden_states.append(hidden)
        for row in rows:
            self.offsets[row] += 1
        return difference(*hidden_states)


class Able(Probe):
    """The model it is given, which says that it is capable of something else."""

    def __init__(self, model: Model, capabilities: Capabilities) -> None:
        super().__init__(model)
        self.capabilities = capabilities


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with(head_dim=32)))


@pytest.mark.parametrize("kv", KVFormat)
def test_a_compiled_model_states_what_it_is_capable_of(model: Model, kv: KVFormat) -> None:
    """It embeds and compiles as its model does; only over standard caches do its steps overlap, and
    its passes are neither made up early nor joined, though the model's may be.
    """
    able = replace(model.capabilities, decodes_in_place=True)
    assert able.stays_lazy
    assert able.joins_passes
    compiled = Pair(Able(model, able), kv).compiled

    expected = replace(able, stays_lazy=False, joins_passes=False, overlaps_steps=kv is PLAIN)
    assert compiled.capabilities == expected
    slow = replace(able, decodes_in_place=False)
    assert not Pair(Able(model, slow), kv).compiled.capabilities.overlaps_steps


@pytest.mark.parametrize("kv", KVFormat)
def test_a_step_by_slots_gives_what_the_models_own_pass_gives(model: Model, kv: KVFormat) -> None:
    """Rows of one arena and of several, in any order, joining and leaving, alone or not."""
    pair = Pair(model, kv)
    first = pair.join(0, 5)
    assert pair.step([first]) < 1e-4
    second, third = pair.join(1, 9), pair.join(2, 300)
    assert pair.step([first, second]) < 1e-4
    assert pair.step([third, first, second]) < 1e-4
    assert pair.compiled.steps >= 3
    pair.leave(first)
    fourth = pair.join(3, 255)
    for _ in range(3):  # the last one crosses into the class above
        assert pair.step([fourth, second, third]) < 1e-4


def test_rows_that_are_not_in_a_step_keep_what_they_hold(model: Model) -> None:
    """A row whose prompt is being read, and free slots, take part without a trace."""
    pair = Pair(model)
    decoding, reading = pair.join(0, 6), pair.join(1, 4, room=200)
    gone = pair.join(2, 30)
    pair.leave(gone)
    for _ in range(3):
        assert pair.step([decoding]) < 1e-4
        pair.read(reading, 5)
    other = pair.join(3, 2)
    assert pair.step([reading, other, decoding]) < 1e-4
    assert pair.step([other]) < 1e-4
    assert pair.step([decoding, reading]) < 1e-4


def test_a_waiting_row_that_is_full_sends_the_step_to_the_models_own_pass(model: Model) -> None:
    """There is no position of such a row that could be written without loss."""
    pair = Pair(model)
    full, other = pair.join(0, 256), pair.join(1, 8)
    assert pair.step([other]) < 1e-4
    kept = pair.compiled.steps
    third = pair.join(2, 8)
    assert pair.step([other, third]) < 1e-4
    assert pair.compiled.steps == kept
    assert pair.step([full]) < 1e-4
