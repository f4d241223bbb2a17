"""Prompts that outlive their engine: what comes back from disk, when, and with the same tokens."""

from __future__ import annotations

import itertools
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from structlog.testing import capture_logs

from mlxd_shared.blocks.block_file import Block, Part
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.vision.sight import key_of_image
from tests.support.engines import TinyEngine, tiny_engine
from tests.support.kept_on_disk import BLOCK_TOKENS, disk_of, engine_with_disk
from tests.support.remembering import MEMORIES, WINDOW, answer_of, tokens_of

DEMO = Path(__file__).parents[3] / "shared" / "mlxd_shared" / "demo_model"
PROMPT = tokens_of(1, 100)
WHOLE = 99 // BLOCK_TOKENS * BLOCK_TOKENS
"""What of the prompt is in blocks."""
FURTHER = (*PROMPT, *tokens_of(2, 20))


@pytest.fixture(scope="module", params=MEMORIES)
def memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A tiny model of each kind of memory, with its name."""
    return request.param, MEMORIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that remembers every position."""
    return MEMORIES["standard"](tmp_path_factory.mktemp("standard"))


@cache
def cold_ids(model: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return what an engine without any memory answers."""
    return tiny_engine(model, keeps_spares=False).alone(prompt).ids


def ask(tiny: TinyEngine, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """Return an answer, and how many of the prompt's tokens were not evaluated."""
    sink = tiny.alone(prompt)
    return sink.ids, answer_of(sink).cached


def test_what_was_used_twice_outlives_a_kill(memory: tuple[str, Path], tmp_path: Path) -> None:
    """Of every kind of layer: the next engine evaluates the rest, and answers the same."""
    _, model = memory
    with engine_with_disk(model, tmp_path / "blocks") as first:
        assert ask(first, PROMPT)[1] == 0
        assert len(disk_of(first).tier.store) == 0, "one use is none that is worth a write"
        assert ask(first, PROMPT)[1] == len(PROMPT) - 1

    with engine_with_disk(model, tmp_path / "blocks") as second:
        ids, cached = ask(second, FURTHER)
        assert cached == WHOLE
        assert ids == cold_ids(model, FURTHER)
        assert disk_of(second).tier.store.counts.read > 0
        again, cached = ask(second, FURTHER)
        assert (again, cached) == (ids, len(FURTHER) - 1), "it is in memory by now"


def test_what_was_used_once_outlives_an_unload(memory: tuple[str, Path], tmp_path: Path) -> None:
    """Before the model goes, all that is worth it is written; of what was said, too."""
    name, model = memory
    with engine_with_disk(model, tmp_path / "blocks", save=True) as first:
        said, _ = ask(first, PROMPT)

    talk = (*PROMPT, *said, *tokens_of(3, 9))
    with engine_with_disk(model, tmp_path / "blocks") as second:
        ids, cached = ask(second, talk)
        assert cached == WHOLE
        assert ids == cold_ids(model, talk)
    del name


def test_only_what_layers_hold_is_written(memory: tuple[str, Path], tmp_path: Path) -> None:
    """Entries for layers that keep each position, one state for the others; nothing twice."""
    name, model = memory
    with engine_with_disk(model, tmp_path / "blocks") as first:
        for _ in range(3):
            ask(first, PROMPT)

    files = [path.stem.split("-") for path in (tmp_path / "blocks").glob("v*/*.safetensors")]
    depths = {part: sorted(int(depth) for _, depth, own in files if own == part) for part in Part}
    last = WHOLE // BLOCK_TOKENS - 1
    assert depths[Part.ENTRIES] == ([] if name == "sliding" else list(range(last + 1)))
    assert depths[Part.STATE] == ([last] if name in {"sliding", "mixed", "hybrid"} else [])
    assert WINDOW < WHOLE, "the window has wrapped by then"


def test_beside_rows_a_step_copies_no_more_than_it_may(
    memory: tuple[str, Path], tmp_path: Path
) -> None:
    """An array at least, where none is as small: as many steps as arrays, and the same blocks."""
    _, model = memory
    steps = 0
    with engine_with_disk(model, tmp_path / "blocks") as first:
        disk = disk_of(first)
        disk.copied_nbytes_s = 0
        tend = disk.tend

        def count_steps(*, idle: bool) -> None:
            nonlocal steps
            steps += disk.pending
            del idle
            tend(idle=False)

        disk.tend = count_steps  # type: ignore[method-assign]
        for _ in range(2):
            ask(first, PROMPT)
        while disk.pending:
            disk.tend(idle=False)

    arrays = 0
    for path in (tmp_path / "blocks").glob("v*/*.safetensors"):
        with safe_open(path, framework="np") as file:
            arrays += len(file.keys())
    assert steps == arrays > 0
    with engine_with_disk(model, tmp_path / "blocks") as second:
        ids, cached = ask(second, FURTHER)
        assert (ids, cached) == (cold_ids(model, FURTHER), WHOLE)


@pytest.mark.parametrize("kv", [KVFormat.Q8, KVFormat.Q4])
def test_few_bits_come_back_as_they_were(tmp_path: Path, kv: KVFormat) -> None:
    """The demo model's quantised keys and values, bit for bit: the same tokens as from memory."""
    options: dict[str, Any] = {"context_length": 512, "kv": kv}
    with engine_with_disk(DEMO, tmp_path / "blocks", save=True, **options) as first:
        ask(first, PROMPT)
        from_memory, cached = ask(first, (*PROMPT[: WHOLE + 1],))
        assert cached == WHOLE

    with engine_with_disk(DEMO, tmp_path / "blocks", **options) as second:
        assert ask(second, (*PROMPT[: WHOLE + 1],)) == (from_memory, WHOLE)


def test_nothing_is_read_up_to_within_an_image(standard: Path, tmp_path: Path) -> None:
    """Of blocks that end there none is read, unless one behind it ends without an image."""
    begin, image = BLOCK_TOKENS - 4, key_of_image(b"shown", BLOCK_TOKENS)
    keys = (*PROMPT[:begin], *image, *PROMPT[begin + BLOCK_TOKENS :])
    with engine_with_disk(standard, tmp_path / "blocks", save=True) as first:
        for length in (2 * BLOCK_TOKENS - 2, len(PROMPT)):
            first.alone(PROMPT[:length], keys=keys[:length])

    within = 2 * BLOCK_TOKENS - 4
    for length, cached in ((within, 0), (len(PROMPT), WHOLE)):
        with engine_with_disk(standard, tmp_path / "blocks") as second:
            sink = second.alone(PROMPT[:length], keys=keys[:length])
            assert answer_of(sink).cached == cached
            assert (disk_of(second).tier.store.counts.read > 0) is (cached > 0)


def test_a_trained_model_goes_on_alike(tmp_path: Path) -> None:
    """The demo model's story, continued through three restarts, has a cold engine's tokens.

    Each turn evaluates no more than what is new and one block.
    """
    story = (*tokens_of(4, 40),)
    for turn in range(4):
        with engine_with_disk(DEMO, tmp_path / "blocks", save=True) as tiny:
            ids, cached = ask(tiny, story)
            assert ids == cold_ids(DEMO, story)
            new = 40 if not turn else 8 + 5
            assert len(story) - cached <= new + BLOCK_TOKENS
        story = (*story, *ids, *tokens_of(10 + turn, 5))


def test_another_model_finds_nothing(standard: Path, tmp_path: Path) -> None:
    """Nor do other weights under the same name: their digest is another."""
    with engine_with_disk(standard, tmp_path / "blocks", save=True) as first:
        ask(first, PROMPT)

    other = {"digest": "e" * 64}
    with engine_with_disk(standard, tmp_path / "blocks", disk_options=other) as second:
        assert ask(second, PROMPT)[1] == 0
        assert disk_of(second).tier.store.counts.read == 0


def test_any_shared_beginning_hits(standard: Path, tmp_path: Path) -> None:
    """Whoever wrote it: as far as whole blocks agree, and to no length in particular."""
    with engine_with_disk(standard, tmp_path / "blocks", save=True) as first:
        ask(first, PROMPT)

    with engine_with_disk(standard, tmp_path / "blocks") as second:
        for shared in (70, 33, 15):
            prompt = (*PROMPT[:shared], *tokens_of(shared, 30))
            ids, cached = ask(second, prompt)
            assert cached >= shared // BLOCK_TOKENS * BLOCK_TOKENS
            assert ids == cold_ids(standard, prompt)


def test_memory_and_disk_go_together(memory: tuple[str, Path], tmp_path: Path) -> None:
    """What memory has is not read; what it lost is, with no restart between."""
    _, model = memory
    with engine_with_disk(model, tmp_path / "blocks", save=True) as tiny:
        ask(tiny, PROMPT)
        disk_of(tiny).save(timeout_s=60.0)
        written = disk_of(tiny).tier.store.counts.written
        assert written > 0
        ask(tiny, PROMPT)
        assert disk_of(tiny).tier.store.counts.read == 0
        tiny.prefix.shrink(0)
        ask(tiny, PROMPT[:40])
        read_before = disk_of(tiny).tier.store.counts.read

        ids, cached = ask(tiny, FURTHER)

        assert (ids, cached) == (cold_ids(model, FURTHER), WHOLE)
        assert disk_of(tiny).tier.store.counts.read > read_before


@pytest.mark.parametrize("block", [0, 2, 5])
def test_a_damaged_file_costs_what_is_behind_it(standard: Path, tmp_path: Path, block: int) -> None:
    """The row computes from there on: the same tokens, one line, and no file."""
    with engine_with_disk(standard, tmp_path / "blocks", save=True) as first:
        ask(first, PROMPT)
    (path,) = (tmp_path / "blocks").glob(f"v*/*-{block}-entries.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)

    with engine_with_disk(standard, tmp_path / "blocks") as second, capture_logs() as logs:
        ids, cached = ask(second, PROMPT)
    assert (ids, cached) == (cold_ids(standard, PROMPT), block * BLOCK_TOKENS)
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["removed a block"]
    assert not path.exists()


def test_a_damaged_state_costs_the_prompt_and_no_more(tmp_path: Path) -> None:
    """Layers with a state stand nowhere without it; what had arrived is given back."""
    model = MEMORIES["hybrid"](tmp_path / "model")
    with engine_with_disk(model, tmp_path / "blocks", save=True) as first:
        ask(first, PROMPT)
    (path,) = (tmp_path / "blocks").glob(f"v*/*-{WHOLE // BLOCK_TOKENS - 1}-state.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with engine_with_disk(model, tmp_path / "blocks") as second, capture_logs():
        ids, cached = ask(second, PROMPT)
        assert ids == cold_ids(model, PROMPT)
        assert cached < WHOLE


class Held:
    """A reading thread that goes on when it is let."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, block: Block) -> None:
        """Wait, for any block."""
        del block
        self.entered.set()
        assert self.go_on.wait(60.0)


@pytest.fixture
def held(standard: Path, tmp_path: Path) -> Held:
    """A folder that has the prompt, and what holds whoever reads it."""
    with engine_with_disk(standard, tmp_path / "blocks", save=True) as first:
        ask(first, PROMPT)
    return Held()


def test_the_log_tells_what_came_from_disk(standard: Path, tmp_path: Path) -> None:
    """Of what a prompt did not evaluate: all of it after a restart, nothing once memory has it."""
    with engine_with_disk(standard, tmp_path / "blocks", save=True) as first:
        ask(first, PROMPT)

    with engine_with_disk(standard, tmp_path / "blocks") as second, capture_logs() as logs:
        ask(second, FURTHER)
        ask(second, FURTHER)

    hits = [(log["cached"], log["from_disk"]) for log in logs if log["event"] == "prefix hit"]
    assert hits == [(WHOLE, WHOLE), (len(FURTHER) - 1, 0)]


def test_other_rows_go_on_while_one_waits(standard: Path, tmp_path: Path, held: Held) -> None:
    """A row that waits for the disk holds up neither decoding nor another row's prompt."""
    options = {"check": held}
    with engine_with_disk(standard, tmp_path / "blocks", disk_options=options) as tiny:
        _, waits = tiny.submit(FURTHER)
        tiny.engine.step()
        assert held.entered.wait(60.0)
        _, others = tiny.submit(tokens_of(7, 80), max_tokens=20)
        while not others.ended:
            tiny.engine.step()
        assert not waits.events
        held.go_on.set()
        tiny.run()
        assert waits.ids == cold_ids(standard, FURTHER)
        assert answer_of(waits).cached == WHOLE


def test_a_row_that_leaves_while_it_waits_leaves_nothing(
    standard: Path, tmp_path: Path, held: Held
) -> None:
    """Cancelled in the middle of a read: no snapshot stays, and the next stream is served."""
    options = {"check": held}
    with engine_with_disk(standard, tmp_path / "blocks", disk_options=options) as tiny:
        request, waits = tiny.submit(FURTHER)
        tiny.engine.step()
        assert held.entered.wait(60.0)

        tiny.engine.cancel(request.stream)
        held.go_on.set()
        tiny.run()

        assert (waits.events, tiny.caches.rows) == ([], ())
        assert ask(tiny, FURTHER) == (cold_ids(standard, FURTHER), WHOLE)


def test_a_read_that_is_late_is_given_up(standard: Path, tmp_path: Path, held: Held) -> None:
    """After as long as computing would have taken: the row computes, and the block is let go."""
    now_s = 0.0
    options = {"check": held, "clock": lambda: now_s}
    with engine_with_disk(standard, tmp_path / "blocks", disk_options=options) as tiny:
        ask(tiny, tokens_of(8, 60))  # now it is known what computing takes
        _, waits = tiny.submit(FURTHER)
        tiny.engine.step()
        assert held.entered.wait(60.0)
        assert not waits.events
        now_s = 1e9
        while not waits.ended:
            tiny.engine.step()
        held.go_on.set()

        assert answer_of(waits).cached == 0
        assert waits.ids == cold_ids(standard, FURTHER)


def test_two_that_begin_alike_read_once(standard: Path, tmp_path: Path, held: Held) -> None:
    """The second waits for the first, as it would for its prefill."""
    held.go_on.set()
    with engine_with_disk(standard, tmp_path / "blocks") as tiny:
        sinks = [tiny.submit(FURTHER)[1] for _ in range(2)]
        tiny.run()

        assert [sink.ids for sink in sinks] == [cold_ids(standard, FURTHER)] * 2
        assert disk_of(tiny).tier.store.counts.read == WHOLE // BLOCK_TOKENS


def test_bytes_in_flight_are_bounded(standard: Path, tmp_path: Path) -> None:
    """With room for less than one block all blocks still come and go, one by one."""
    tight = {"in_flight_nbytes": 1}
    with engine_with_disk(standard, tmp_path / "blocks", disk_options=tight, save=True) as first:
        ask(first, PROMPT)

    with engine_with_disk(standard, tmp_path / "blocks", disk_options=tight) as second:
        assert ask(second, FURTHER) == (cold_ids(standard, FURTHER), WHOLE)


@pytest.mark.parametrize("budget_nbytes", [0, 20_000])
def test_a_short_budget_is_honoured(standard: Path, tmp_path: Path, budget_nbytes: int) -> None:
    """Whatever is asked: the folder never holds more, and answers stay the same."""
    options = {"budget_nbytes": budget_nbytes}
    for seed in range(3):
        prompt = tokens_of(seed, 100)
        with engine_with_disk(
            standard, tmp_path / "blocks", disk_options=options, save=True
        ) as tiny:
            assert ask(tiny, prompt)[0] == cold_ids(standard, prompt)
        files = (tmp_path / "blocks").glob("v*/*.safetensors")
        assert sum(path.stat().st_size for path in files) <= budget_nbytes


def test_where_computing_is_quicker_nothing_is_written(standard: Path, tmp_path: Path) -> None:
    """On a machine that computes in no time, however often a prompt comes, or when it goes."""
    moment = (tick * 1e-9 for tick in itertools.count(1)).__next__
    with engine_with_disk(standard, tmp_path / "blocks", clock=moment, save=True) as tiny:
        for _ in range(3):
            ask(tiny, PROMPT)
        assert disk_of(tiny).token_s > 0
    assert not list((tmp_path / "blocks").glob("v*/*.safetensors"))
