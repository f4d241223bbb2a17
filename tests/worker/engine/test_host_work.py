"""What a decode step costs the host for each row: calls of Python are counted, not time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.engine.speculation.depth import SKIPPED_MAX
from mlxd_worker.engine.speculation.speculator import Speculator
from mlxd_worker.engine.stepping.choose import choose
from mlxd_worker.models.base import Model
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.counting import calls_of
from tests.support.engines import GREEDY, Owed, TinyEngine, engine_on
from tests.support.tiny_model import write_tiny_model
from tests.worker.in_place import compiled_in_place
from tests.worker.tiny import config_with, load, write_model

FEW, MANY = 4, 24
CALLS_A_ROW_MAX = 5
"""Calls of Python functions for one more row of a step whose sink asks for its text later."""


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tokenizer"))


def decoding(model: Model, folder: Path, rows: int, **options: Any) -> TinyEngine:
    """Return an engine all of whose rows decode, in arenas that have room for many steps."""
    tiny = engine_on(model, load_tokenizer(folder), rows_max=MANY, context_length=256)
    for number in range(rows):
        tiny.submit((1, 2, 3 + number), max_tokens=100, sink=Owed(), **options)
    while len(tiny.caches.rows) < rows or tiny.caches.table.moving:
        tiny.engine.step()
    for _ in range(6):
        tiny.engine.step()
    return tiny


def calls_a_row(model: Model, folder: Path, **options: Any) -> float:
    """Return the calls that one more row costs a step."""
    few, many = (
        min(calls_of(tiny.engine.step) for _ in range(5))
        for tiny in (decoding(model, folder, rows, **options) for rows in (FEW, MANY))
    )
    return (many - few) / (MANY - FEW)


def test_a_row_costs_few_calls_however_many_layers(
    tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> None:
    """A row's share of a step does not grow with the model, and stays within a bound."""
    shares = []
    for layers in (1, 6):
        config = config_with(num_hidden_layers=layers)
        model = load(write_model(tmp_path_factory.mktemp("model"), config))
        shares.append(calls_a_row(model, folder))

    assert shares[0] == pytest.approx(shares[1], abs=1)
    assert max(shares) < CALLS_A_ROW_MAX


@pytest.fixture(name="as_written")
def _as_written() -> Iterator[None]:
    """Run what a GPU would have compiled as it is written: the same for any number of rows."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("as_written")
def test_a_row_costs_as_few_calls_where_steps_write_in_place(tmp_path: Path, folder: Path) -> None:
    """As a GPU steps rows: ahead, over tokens, in one arena with room for all."""
    tokenizer = load_tokenizer(folder)
    counts = []
    for rows in (FEW, MANY):
        model = load(write_model(tmp_path / str(rows), config_with()))
        passes, caches = compiled_in_place(model, context_max=256, rows_max=32)
        sinks = [Owed() for _ in range(rows)]
        engine = Engine(
            passes,
            caches,
            lambda request: tokenizer.detokenizer(skip_special=request.skip_special_tokens),
            Limits(context_length=256, rows_max=32),
            stepper=choose(passes, caches),
        )
        for number, sink in enumerate(sinks):
            engine.submit(greedy((1, 2, 3 + number), stream=number, sink=sink))
        while not all(sink.ids for sink in sinks):
            engine.step()
        counts.append(min(calls_of(engine.step) for _ in range(5)))

    few, many = counts
    assert (many - few) / (MANY - FEW) < CALLS_A_ROW_MAX


def greedy(prompt: tuple[int, ...], *, stream: int, sink: Owed) -> Submit:
    """Return a greedy stream of many tokens."""
    return Submit(
        stream=StreamId(stream),
        prompt=prompt,
        sampling=GREEDY,
        max_tokens=100,
        submitted_s=0.0,
        sink=sink,
    )


def test_nobody_looks_up_guesses_that_no_arena_could_run(tmp_path: Path, folder: Path) -> None:
    """Where shapes are few and arenas large, rows that would guess cost what others do."""
    model = load(write_model(tmp_path, config_with()))
    tiny = decoding(model, folder, MANY, speculation_depth=4)
    stepper = tiny.engine._stepper
    assert isinstance(stepper, Speculator)

    def most_calls() -> int:  # so many look for guesses in some steps only
        steps = range(SKIPPED_MAX + 1)
        return max(calls_of(tiny.engine.step, Speculator._guesser) for _ in steps)

    assert most_calls() == MANY
    stepper._shapes = frozenset(tiny.caches.shapes())
    assert most_calls() == 0
