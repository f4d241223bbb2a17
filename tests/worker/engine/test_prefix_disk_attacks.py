"""Disks that are full, torn, swapped, slow or gone while an engine serves: the same tokens."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.block_file import Block
from mlxd_shared.domain.errors import ModelUnloaded
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.disk.tier import BlockTier
from tests.shared.blocks.made_blocks import refuse
from tests.support.kept_on_disk import BLOCK_TOKENS, disk_of, engine_with_disk
from tests.support.remembering import MEMORIES, answer_of, tokens_of
from tests.worker.engine.test_prefix_disk import (
    DEMO,
    FURTHER,
    PROMPT,
    WHOLE,
    ask,
    cold_ids,
)

OTHER = tokens_of(21, 90)
WAIT_S = 60.0


class Gate:
    """Lets a reading thread have so many blocks, and holds it at the next one."""

    def __init__(self, *, blocks: int = 0) -> None:
        self._left = blocks
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, block: Block) -> None:
        """Wait, unless the block is among the first."""
        del block
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            assert self.open.wait(WAIT_S)


@pytest.fixture(scope="module", params=MEMORIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each kind of memory."""
    return MEMORIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that remembers every position."""
    return MEMORIES["standard"](tmp_path_factory.mktemp("standard"))


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has both prompts of the model; tests work on copies."""
    folder = tmp_path_factory.mktemp("written") / "blocks"
    with engine_with_disk(model, folder, save=True) as first:
        ask(first, PROMPT)
        ask(first, OTHER)
    return folder


@pytest.fixture
def blocks(written: Path, tmp_path: Path) -> Path:
    """A copy of the folder, of the test's own."""
    return Path(shutil.copytree(written, tmp_path / "blocks"))


class CountingTier(BlockTier):
    """Counts what is handed over."""

    handed_over = 0

    def write(self, block: Block, *, gently: bool = False) -> None:
        """Hand a block over."""
        self.handed_over += 1
        super().write(block, gently=gently)


def test_neighbours_change_nothing(model: Path, blocks: Path) -> None:
    """Two rows that read from disk beside one that decodes and one that computes its prompt."""
    prompts = [tokens_of(22, 50), FURTHER, (*OTHER, *tokens_of(23, 11)), tokens_of(24, 120)]
    with engine_with_disk(model, blocks) as tiny:
        sinks = [tiny.submit(prompts[0])[1]]
        while not sinks[0].events:
            tiny.engine.step()
        sinks += [tiny.submit(prompt)[1] for prompt in prompts[1:]]
        tiny.run()

        assert [sink.ids for sink in sinks] == [cold_ids(model, prompt) for prompt in prompts]
        other = len(OTHER) // BLOCK_TOKENS * BLOCK_TOKENS
        assert [answer_of(sink).cached for sink in sinks] == [0, WHOLE, other, 0]


@pytest.mark.parametrize("arrived", [0, 1, 3])
def test_a_stream_that_leaves_between_two_blocks(model: Path, blocks: Path, arrived: int) -> None:
    """Whatever has arrived for it is given back; the next one has all."""
    gate = Gate(blocks=arrived)
    with engine_with_disk(model, blocks, disk_options={"check": gate}) as tiny:
        request, sink = tiny.submit(FURTHER)
        tiny.engine.step()
        while not (sink.ended or gate.reached.is_set()):
            tiny.engine.step()

        tiny.engine.cancel(request.stream)
        gate.open.set()
        tiny.run()

        assert tiny.caches.rows == ()
        assert ask(tiny, FURTHER)[0] == cold_ids(model, FURTHER)


def test_a_model_that_goes_while_a_row_waits(model: Path, blocks: Path) -> None:
    """The stream ends with what ended the model, and nothing is left open."""
    gate = Gate()
    with engine_with_disk(model, blocks, disk_options={"check": gate}) as tiny:
        _, sink = tiny.submit(FURTHER)
        tiny.engine.step()
        assert gate.reached.wait(WAIT_S)

        gate.open.set()
        disk_of(tiny).close(timeout_s=WAIT_S)
        tiny.prefix.clear()
        tiny.engine.release_all(ModelUnloaded("tiny"))

        assert sink.outcome == str(ModelUnloaded("tiny"))
        assert (tiny.caches.rows, tiny.prefix.waiting) == ((), set())


def test_a_folder_that_vanishes_under_a_read(model: Path, blocks: Path) -> None:
    """What has not arrived is computed, and what comes after is not written; with one line."""
    gate = Gate(blocks=1)
    with engine_with_disk(model, blocks, disk_options={"check": gate}) as tiny:
        with capture_logs() as logs:
            _, sink = tiny.submit(FURTHER)
            tiny.engine.step()
            shutil.rmtree(blocks)
            gate.open.set()
            tiny.run()
            for _ in range(3):
                assert ask(tiny, PROMPT)[0] == cold_ids(model, PROMPT)
            assert disk_of(tiny).tier.flush(timeout_s=WAIT_S)
        assert sink.ids == cold_ids(model, FURTHER)
        warnings = [log["event"] for log in logs if log["log_level"] == "warning"]
        assert warnings == ["blocks are not written any more"]
    assert not blocks.exists()


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "blocks are not written any more"),
        (errno.EIO, "blocks are not written any more"),
    ],
)
def test_a_disk_that_takes_nothing(model: Path, tmp_path: Path, fault: int, line: str) -> None:
    """Full, read-only or broken: one line for all of it, and answers as from memory."""
    options = {"open_files": partial(refuse, fault=fault)}
    with (
        capture_logs() as logs,
        engine_with_disk(model, tmp_path / "blocks", save=True, disk_options=options) as tiny,
    ):
        assert ask(tiny, PROMPT)[0] == cold_ids(model, PROMPT)
        assert ask(tiny, PROMPT) == (cold_ids(model, PROMPT), len(PROMPT) - 1)
        assert ask(tiny, OTHER)[0] == cold_ids(model, OTHER)
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == [line]
    assert [path.name for path in (tmp_path / "blocks").glob("v*/*")] == ["lock"]


def test_nothing_is_cut_for_a_disk_that_failed(standard: Path, tmp_path: Path) -> None:
    """Blocks that wait for their turn cost the engine's thread nothing any more."""
    go_on = threading.Event()
    options = {
        "in_flight_nbytes": 1,
        "open_files": partial(refuse, fault=errno.EROFS, go_on=go_on),
        "make_tier": CountingTier,
    }
    with (
        capture_logs(),
        engine_with_disk(standard, tmp_path / "blocks", disk_options=options) as tiny,
    ):
        ask(tiny, PROMPT)
        _, sink = tiny.submit(PROMPT)
        while not sink.ended:
            tiny.engine.step()
        tier = disk_of(tiny).tier
        assert isinstance(tier, CountingTier)
        assert disk_of(tiny).pending, "one is being written, the others wait"
        assert tier.handed_over == 1
        go_on.set()
        assert tier.flush(timeout_s=WAIT_S)

        ask(tiny, OTHER)

        assert tier.handed_over == 1


def test_a_bound_that_is_reached_while_a_row_reads(model: Path, blocks: Path) -> None:
    """Room is made for another prompt's blocks, of what is being read or not: the same tokens."""
    held_nbytes = sum(path.stat().st_size for path in blocks.glob("v*/*.safetensors"))
    gate = Gate(blocks=1)
    options = {"check": gate, "budget_nbytes": held_nbytes}
    with engine_with_disk(model, blocks, disk_options=options) as tiny:
        _, waits = tiny.submit(FURTHER)
        tiny.engine.step()
        third = tokens_of(25, 100)
        for _ in range(2):
            _, sink = tiny.submit(third)
            while not sink.ended:
                tiny.engine.step()
            assert sink.ids == cold_ids(model, third)
        gate.open.set()
        tiny.run()
        assert disk_of(tiny).tier.flush(timeout_s=WAIT_S)
        assert disk_of(tiny).tier.store.counts.evicted > 0
        assert waits.ids == cold_ids(model, FURTHER)
    assert sum(path.stat().st_size for path in blocks.glob("v*/*.safetensors")) <= held_nbytes


def _swap(paths: list[Path]) -> None:
    first, last = paths[0].read_bytes(), paths[-1].read_bytes()
    paths[0].write_bytes(last)
    paths[-1].write_bytes(first)


def _cut(paths: list[Path]) -> None:
    for path in paths:
        os.truncate(path, path.stat().st_size // 2)


def _flip(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        raw = bytearray(path.read_bytes())
        raw[(number * 7919) % len(raw)] ^= 1 << number % 8
        path.write_bytes(raw)


def _lead_out(paths: list[Path]) -> None:
    for path in paths:
        moved = path.rename(path.parent.parent / path.name)
        path.symlink_to(moved)


@pytest.mark.parametrize("damage", [_swap, _cut, _flip, _lead_out])
def test_whatever_files_become(
    model: Path, blocks: Path, damage: Callable[[list[Path]], None]
) -> None:
    """Swapped, torn, of other bits, or links that lead out: no wrong token, no crash, and none is
    left where it was looked for. What is written anew is sound, however much was not looked for.
    """
    with engine_with_disk(model, blocks, save=True) as tiny, capture_logs() as logs:
        damage(sorted(blocks.glob("v*/*.safetensors")))
        for prompt in (FURTHER, (*OTHER, *tokens_of(26, 9))):
            assert ask(tiny, prompt)[0] == cold_ids(model, prompt)
    events = {log["event"] for log in logs if log["log_level"] == "warning"}
    assert events == {"removed a block"}

    with engine_with_disk(model, blocks) as again:
        assert ask(again, FURTHER)[0] == cold_ids(model, FURTHER)


def test_a_disk_that_hangs_before_anything_was_computed(model: Path, blocks: Path) -> None:
    """Nobody knows yet what computing takes: after a few times what a read should take it is."""
    now_s, gate = 0.0, Gate()
    options = {"check": gate, "clock": lambda: now_s}
    with engine_with_disk(model, blocks, disk_options=options) as tiny:
        _, sink = tiny.submit(FURTHER)
        tiny.engine.step()
        assert gate.reached.wait(WAIT_S)
        assert not sink.events
        now_s = 60.0
        while not sink.ended:
            tiny.engine.step()
        gate.open.set()

        assert answer_of(sink).cached == 0
        assert sink.ids == cold_ids(model, FURTHER)


@pytest.mark.parametrize("then", [KVFormat.MODEL, KVFormat.Q4])
def test_another_form_of_keys_and_values_finds_nothing(tmp_path: Path, then: KVFormat) -> None:
    """Eight bits are neither four nor whole numbers: another form, another folder."""
    with engine_with_disk(DEMO, tmp_path / "blocks", save=True, kv=KVFormat.Q8) as first:
        ask(first, PROMPT)
    with engine_with_disk(DEMO, tmp_path / "blocks", kv=then) as second:
        assert ask(second, PROMPT)[1] == 0
        assert disk_of(second).tier.store.counts.read == 0
    assert len(list((tmp_path / "blocks").iterdir())) == 2
