"""Rows beside one that reads its prompt from disk, or whose prompt is written: what a step does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from mlxd_shared.blocks.block_file import Block
from mlxd_shared.blocks.policy import Rates, read_s
from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.disk.prefixes import COPIED_NBYTES_S, PUT_NBYTES_S
from mlxd_worker.cache.kept.stacks import LayerState
from mlxd_worker.cache.prefix.trie_node import key_of
from tests.support.engines import Collected, TinyEngine, tiny_engine
from tests.support.kept_on_disk import BLOCK_TOKENS, SettledTier, disk_of, engine_with_disk
from tests.support.remembering import MEMORIES, answer_of, tokens_of

PROMPT = tokens_of(1, 100)
WHOLE = 99 // BLOCK_TOKENS * BLOCK_TOKENS
"""What of the prompt is in blocks."""
WAIT_S = 60.0
LONG_TOKENS = 300
"""Of a stream that decodes for as long as a test needs it."""


@cache
def cold_ids(model: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return what an engine without any memory answers."""
    return tiny_engine(model, keeps_spares=False).alone(prompt).ids


class Puts:
    """How many layers each row had put ahead of it, by step."""

    def __init__(self, tiny: TinyEngine) -> None:
        self._tiny = tiny
        self.steps: list[Counter[RowId]] = []
        contents = tiny.caches.contents
        put_ahead = contents.put_ahead

        def note(row: RowId, kind: Kind, start: int, states: Mapping[int, LayerState]) -> None:
            self.steps[-1][row] += len(states)
            put_ahead(row, kind, start, states)

        contents.put_ahead = note  # type: ignore[method-assign]

    def step(self) -> None:
        """Do one step."""
        self.steps.append(Counter())
        self._tiny.engine.step()

    def run(self, *sinks: Collected) -> None:
        """Step until these streams have ended."""
        while not all(sink.ended for sink in sinks):
            self.step()

    @property
    def layers(self) -> list[int]:
        """How many layers were put, of the steps in which any was."""
        return [layers for step in self.steps if (layers := step.total())]


class Gate:
    """A reading thread that goes on behind a block when it is let."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.go_on = threading.Event()

    def __call__(self, block: Block) -> None:
        """Wait, at the block of one depth or those behind it."""
        assert block.depth < self._depth or self.go_on.wait(WAIT_S)


def write_prompt(model: Path, folder: Path) -> None:
    """Leave the prompt's blocks on disk."""
    with engine_with_disk(model, folder, save=True) as tiny:
        tiny.alone(PROMPT)


def layers_of(tiny: TinyEngine) -> int:
    """Return how many layers keep entries."""
    layers = tiny.caches.contents.layers
    return sum(len(same) for kind, same in layers.items() if kind.sliceable)


@contextmanager
def decoding(tiny: TinyEngine) -> Iterator[None]:
    """Have a stream decode until the end."""
    request, sink = tiny.submit(tokens_of(7, 5), max_tokens=LONG_TOKENS)
    while not sink.events:
        tiny.engine.step()
    yield
    assert not sink.ended
    tiny.engine.cancel(request.stream)


@pytest.fixture(scope="module", params=[name for name in MEMORIES if name != "sliding"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each kind of memory that keeps entries."""
    return MEMORIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that remembers every position."""
    return MEMORIES["standard"](tmp_path_factory.mktemp("standard"))


def test_beside_rows_a_step_puts_back_no_more_than_it_may(model: Path, tmp_path: Path) -> None:
    """A layer at least, where none is as small; the same tokens, and as much of the prompt."""
    write_prompt(model, tmp_path)
    with engine_with_disk(model, tmp_path) as tiny:
        disk_of(tiny).put_nbytes_s = 0
        puts = Puts(tiny)
        with decoding(tiny):
            _, sink = tiny.submit(PROMPT)
            puts.run(sink)

            assert set(puts.layers) == {1}
            assert len(puts.layers) == layers_of(tiny) * (WHOLE // BLOCK_TOKENS)
            assert (sink.ids, answer_of(sink).cached) == (cold_ids(model, PROMPT), WHOLE)


def test_alone_a_step_puts_back_a_block(model: Path, tmp_path: Path) -> None:
    """However little it might beside others: nobody waits for the step."""
    write_prompt(model, tmp_path)
    with engine_with_disk(model, tmp_path) as tiny:
        disk_of(tiny).put_nbytes_s = 0
        puts = Puts(tiny)
        _, sink = tiny.submit(PROMPT)
        puts.run(sink)

        assert puts.layers == [layers_of(tiny)] * (WHOLE // BLOCK_TOKENS)
        assert (sink.ids, answer_of(sink).cached) == (cold_ids(model, PROMPT), WHOLE)


def test_rows_that_read_share_what_a_step_may_put_back(standard: Path, tmp_path: Path) -> None:
    """Two that wait have one layer a step between them."""
    other = tokens_of(2, 70)
    write_prompt(standard, tmp_path)
    with engine_with_disk(standard, tmp_path, save=True) as tiny:
        tiny.alone(other)
    with engine_with_disk(standard, tmp_path) as tiny:
        disk_of(tiny).put_nbytes_s = 0
        puts = Puts(tiny)
        with decoding(tiny):
            sinks = [tiny.submit(prompt)[1] for prompt in (PROMPT, other)]
            puts.run(*sinks)

            assert set(puts.layers) == {1}
            assert [sink.ids for sink in sinks] == [cold_ids(standard, p) for p in (PROMPT, other)]
            assert [answer_of(sink).cached for sink in sinks] == [
                WHOLE,
                69 // BLOCK_TOKENS * BLOCK_TOKENS,
            ]


def test_beside_rows_a_prompt_is_read_where_putting_it_back_pays(
    standard: Path, tmp_path: Path
) -> None:
    """A disk is no quicker than the steps into which its blocks go."""
    write_prompt(standard, tmp_path)
    with engine_with_disk(standard, tmp_path) as tiny:
        disk, key = disk_of(tiny), key_of(PROMPT)
        store = disk.tier.store
        rates = (Rates(), Rates(read_nbytes_s=PUT_NBYTES_S))
        block_s = [read_s(each, store.nbytes // len(store)) for each in rates]
        disk.token_s, disk.put_nbytes_s = sum(block_s) / 2 / BLOCK_TOKENS, PUT_NBYTES_S

        reading = disk.find(key, start=0, limit=WHOLE)
        assert reading is not None
        disk.tier.cancel(reading)
        disk.beside_rows = True
        assert disk.find(key, start=0, limit=WHOLE) is None


def test_steps_stay_ahead_while_a_row_waits(standard: Path, tmp_path: Path) -> None:
    """No prompt can be evaluated before the disk has answered, so the next step is dispatched."""
    write_prompt(standard, tmp_path)
    gate = Gate()
    options = {"check": gate}
    with engine_with_disk(standard, tmp_path, disk_options=options) as tiny, decoding(tiny):
        _, sink = tiny.submit(PROMPT)
        while not tiny.prefix.waiting:
            tiny.engine.step()
        for _ in range(3):
            tiny.engine.step()
            assert tiny.plain.ahead
        gate.go_on.set()
        while not sink.ended:
            tiny.engine.step()

        assert (sink.ids, answer_of(sink).cached) == (cold_ids(standard, PROMPT), WHOLE)


def test_a_row_that_leaves_within_a_block_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """Cancelled while a block is being put: the next stream gets all of the prompt, and its tokens.

    And a third one in the same place, whose prompt is not on disk, sees nothing of it.
    """
    write_prompt(model, tmp_path)
    with engine_with_disk(model, tmp_path) as tiny:
        disk_of(tiny).put_nbytes_s = 0
        puts = Puts(tiny)
        with decoding(tiny):
            request, sink = tiny.submit(PROMPT)
            while len(puts.layers) < 2:
                puts.step()
            tiny.engine.cancel(request.stream)
            assert not sink.events

            others = [PROMPT, tokens_of(8, 90)]
            for prompt in others:
                _, sink = tiny.submit(prompt)
                puts.run(sink)
                assert sink.ids == cold_ids(model, prompt)


class Clock:
    """A disk's clock, which stands still until it is put forward."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def test_a_read_that_is_late_is_given_up_behind_a_block(standard: Path, tmp_path: Path) -> None:
    """What was put in parts stays; what comes behind it is computed."""
    write_prompt(standard, tmp_path)
    clock, gate = Clock(), Gate(depth=1)
    options = {"check": gate, "clock": clock}
    with engine_with_disk(standard, tmp_path, disk_options=options) as tiny, decoding(tiny):
        disk_of(tiny).put_nbytes_s = 0
        puts = Puts(tiny)
        _, sink = tiny.submit(PROMPT)
        while sum(puts.layers) < layers_of(tiny):
            puts.step()
        clock.now_s = 1e9
        puts.run(sink)
        gate.go_on.set()

        assert (sink.ids, answer_of(sink).cached) == (cold_ids(standard, PROMPT), BLOCK_TOKENS)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_only_beside_rows_on_a_cpu_are_blocks_written_with_pauses(
    standard: Path, tmp_path: Path, *, beside: bool, on_cpu: bool
) -> None:
    """Elsewhere nobody shares the cores with the thread that writes."""
    with engine_with_disk(
        standard, tmp_path / "blocks", disk_options={"make_tier": SettledTier}
    ) as first:
        disk = disk_of(first)
        disk.copied_nbytes_s = COPIED_NBYTES_S if on_cpu else None
        tend = disk.tend
        disk.tend = lambda *, idle: tend(idle=not beside)  # type: ignore[method-assign]
        for _ in range(2):
            first.alone(PROMPT)
        while disk.pending:
            disk.tend(idle=False)
        assert isinstance(disk.tier, SettledTier)
        assert set(disk.tier.gentle) == {beside and on_cpu}
