"""Where arenas have no room yet: who waits, and what moves meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import tiny_engine
from tests.support.tiny_model import write_tiny_model
from tests.worker.engine.test_loop import prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_rows_wait_in_order_where_arenas_have_no_room(folder: Path) -> None:
    """A stream whose class has no room yet waits though rows are free, nobody overtakes it, and all
    get the tokens of their lone runs.
    """
    tiny = tiny_engine(folder, rows_max=8)
    lengths = [5, 300, 300, 300, 300, 300, 5, 300]
    prompts = [prompt_of(n, length) for n, length in enumerate(lengths)]
    together = [tiny.submit(prompt, max_tokens=40)[1] for prompt in prompts]
    started: list[int] = []
    held_back = 0

    while tiny.engine.busy:
        tiny.engine.step()
        load = tiny.engine.occupancy()
        held_back += load.waiting > 0 and load.running < 8
        started += [n for n, sink in enumerate(together) if sink.events and n not in started]

    assert held_back > 0
    assert sorted(started) == list(range(8))
    lone = [tiny.alone(prompt, max_tokens=40).ids for prompt in prompts]
    assert [sink.ids for sink in together] == lone
    tiny.rest()


def test_a_class_moves_one_row_a_step(folder: Path) -> None:
    """Rows that outgrew their arena follow into the larger one while everybody goes on."""
    tiny = tiny_engine(folder, rows_max=16, context_length=4096)
    first = [tiny.submit(prompt_of(n, 3000 + n), max_tokens=60)[1] for n in range(2)]
    tiny.engine.step()
    tables = [tiny.caches.table.arenas]
    for _ in range(8):
        tiny.engine.step()
        tables.append(tiny.caches.table.arenas)
    tiny.run()

    assert [[arena.slots for arena in arenas] for arenas in (tables[0], tables[-1])] == [[2], [2]]
    assert tiny.caches.table.finished_moves == 0
    assert [len(sink.ids) for sink in first] == [60, 60]
