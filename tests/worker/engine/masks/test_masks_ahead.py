"""Rows that wait for slow masks, beside others that are decoded a step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.stepping.ahead import Ahead, Lead
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Model, Passes
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.engines import TinyEngine, engine_on
from tests.support.held_masks import Gate, hold_masks
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.worker.engine.masks.test_slow_masks import PLAIN, PROMPT, request_fields, step_until
from tests.worker.engine.test_loop import prompt_of

CONTEXT, ROWS_MAX = 2048, 4
LENGTH, AT = 252, 4
"""The prompt and the masks after which a row's next token takes it to the next class."""

pytestmark = pytest.mark.skipif(not runs_cpu(), reason="only there a step is made up ahead")


class Watched(Ahead):
    """Remembers whether a step was under way whenever it was told to rest."""

    def __init__(self, model: Passes, caches: RowCaches) -> None:
        """Step as others do on a CPU."""
        super().__init__(model, caches, lead=Lead.MADE_UP)
        self.rested: list[bool] = []

    def rest(self) -> None:
        """Rest."""
        self.rested.append(self.ahead)
        super().rest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    """Its tokenizer."""
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """The model, loaded."""
    return load_model(inspect_model(folder), form=FloatType.F32, progress=lambda *_: None)


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> Constraint:
    """A constraint whose masks are quick."""
    return Constraints(tokenizer, VOCAB).compile(ResponseFormat(FormatKind.JSON_SCHEMA, PLAIN))


@pytest.fixture
def make(model: Model, tokenizer: Tokenizer) -> Callable[[], TinyEngine]:
    """What makes an engine."""
    return lambda: engine_on(
        model, tokenizer, rows_max=ROWS_MAX, context_length=CONTEXT, chunk=LENGTH,
        make_plain=Watched,
    )  # fmt: skip


@contextmanager
def close_gate(gate: Gate) -> Iterator[Gate]:
    """Open the gate in the end, whatever comes: nobody ends while a thread stands in it."""
    try:
        yield gate
    finally:
        gate.go.set()


@pytest.mark.parametrize("beside", [3, 300], ids=["leaves theirs", "enters theirs"])
def test_a_row_that_comes_back_and_moves_waits_for_the_step_ahead(
    make: Callable[[], TinyEngine], plain: Constraint, beside: int
) -> None:
    """Its neighbours' step refers to the arrays that change; no stream is any different by it."""
    tiny, row = make(), RowId(2)
    prompts = (prompt_of(1, beside), prompt_of(2, beside), prompt_of(9, LENGTH))
    with close_gate(Gate(at=AT)) as gate:
        streams = [tiny.submit(prompt, max_tokens=None) for prompt in prompts[:2]]
        streams.append(
            tiny.submit(prompts[2], **request_fields(hold_masks(plain, gate), max_tokens=None))
        )
        step_until(tiny, gate.reached.is_set)
        step_until(tiny, lambda: tiny.plain.ahead)
        assert tiny.caches.table.place(row).capacity == 256
    rested = step_until_moved(tiny, row)

    assert True in rested
    counts = [len(sink.ids) for _, sink in streams]
    step_until(
        tiny, lambda: all(len(s.ids) > n + 9 for (_, s), n in zip(streams, counts, strict=True))
    )
    for request, _ in streams:
        tiny.engine.cancel(request.stream)
    tiny.rest()
    for (_, sink), prompt in zip(streams, prompts, strict=True):
        options = request_fields(plain) if prompt == prompts[2] else {}
        alone = make().alone(prompt, **{**options, "max_tokens": len(sink.ids)})
        assert alone.ids == sink.ids


def step_until_moved(tiny: TinyEngine, row: RowId) -> list[bool]:
    """Step until the row moves to another class; return what was under way as that step rested."""
    assert isinstance(tiny.plain, Watched)
    before = tiny.caches.table.place(row).capacity
    while tiny.caches.table.place(row).capacity == before:
        assert tiny.plain.ahead, "the row came back at a step that was not ahead"
        tiny.plain.rested.clear()
        tiny.engine.step()
    return tiny.plain.rested


def test_others_are_admitted_while_a_step_ahead_is_nobodys(
    make: Callable[[], TinyEngine], plain: Constraint
) -> None:
    """Its rows have gone, and the one that is left waits for a mask: it takes up nothing."""
    expected = make().alone((5, 6)).ids
    tiny = make()
    with close_gate(Gate()) as gate:
        gone, sink = tiny.submit((7, 8), max_tokens=None)
        _, slow = tiny.submit(PROMPT, **request_fields(hold_masks(plain, gate)))
        step_until(tiny, gate.reached.is_set)
        step_until(tiny, lambda: tiny.plain.ahead)
        tiny.engine.cancel(gone.stream)
        _, comes = tiny.submit((5, 6))

        for _ in range(2 + len(expected)):
            tiny.engine.step()
        assert comes.ids == expected
        assert comes.ended
        assert not slow.ended
        assert not sink.ended
    tiny.run()
    assert slow.ids == make().alone(PROMPT, **request_fields(plain)).ids
