"""The prefix cache by itself, on rows that are driven by hand: what is found, left and pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.kept.points import GRID_TOKENS, ROLLING_KEPT
from mlxd_worker.cache.prefix.lookup import Lookup
from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.effort import examples
from tests.support.random_model import (
    TINY,
    write_dense_model,
    write_hybrid_model,
    write_sliding_model,
)
from tests.support.remembering import AMPLE, tokens_of

CONTEXT = 512
WINDOW = 4
A = (1, 2, 3, 4, 5, 6, 7, 8)
GENERATED = (20, 21)
B = (1, 2, 3, 4, 5, 10, 11, 12)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "standard": write_dense_model,
    "sliding": lambda folder: write_sliding_model(folder, window=WINDOW, mixed=False),
    "mixed": lambda folder: write_sliding_model(folder, window=WINDOW, mixed=True),
    "recurrent": lambda folder: write_hybrid_model(folder, shape=TINY),
}
REWINDABLE = {"standard"}


@dataclass(slots=True)
class Driver:
    """Rows of a tiny model, driven pass by pass as the engine does."""

    model: Model
    caches: RowCaches
    prefix: PrefixCache
    rows: int = 0

    def begin(self, prompt: Sequence[int]) -> tuple[RowId, Lookup]:
        """Join a row and look its prompt up."""
        row = RowId(self.rows)
        self.rows += 1
        assert self.caches.join(row, tokens=len(prompt))
        start = self.prefix.begin(row, prompt)
        assert self.caches.contents.offset(row) == start.cached
        return row, start

    def prefill(self, row: RowId, prompt: Sequence[int], *, stop: int | None = None) -> list[int]:
        """Evaluate a prompt up to `stop` or its last token; return where passes ended."""
        stops = []
        end = len(prompt) - 1 if stop is None else stop
        while (offset := self.caches.contents.offset(row)) < end:
            due = self.caches.contents.next_stop(row)
            stops.append(end if due is None else min(due, end))
            self._pass(row, prompt[offset : stops[-1]])
        return stops

    def decode(self, row: RowId, tokens: Sequence[int]) -> None:
        """Evaluate tokens one by one."""
        for token in tokens:
            self.caches.reserve(row, tokens=self.caches.contents.offset(row) + 1)
            self._pass(row, [token])

    def run(self, prompt: Sequence[int], generated: Sequence[int] = ()) -> Lookup:
        """Run a row that is said to generate these tokens, the last of which is not evaluated."""
        row, start = self.begin(prompt)
        self.prefill(row, prompt)
        if generated:
            self.decode(row, prompt[-1:])
            self.prefix.publish(row)
            self.decode(row, generated[:-1])
        self.prefix.leave(row, generated)
        return start

    def _pass(self, row: RowId, tokens: Sequence[int]) -> None:
        offset = self.caches.contents.offset(row)
        self.model.forward(Batch.prefill(tokens, offset, row), self.caches)
        mx.eval(self.caches.state())
        self.prefix.advance(row)


def driver(folder: Path, *, budget_nbytes: int = AMPLE) -> Driver:
    """Return a driver of the model in `folder`."""
    model = load_model(inspect_model(folder), form=FloatType.F32, progress=lambda *_: None)
    layers = model.new_caches(context_max=CONTEXT)
    caches = RowCaches(layers, context_max=CONTEXT, rows_max=4)
    return Driver(model, caches, PrefixCache(caches, budget_nbytes=budget_nbytes))


def token_nbytes(folder: Path) -> int:
    """Return what layers that can be cut take for each token of the model in `folder`."""
    layers = (layer for layer in driver(folder).caches.layers if layer is not None)
    return sum(layer.slot_nbytes(256) for layer in layers if layer.kind.sliceable) // 256


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A tiny model of each kind of memory, with its name."""
    return request.param, WRITERS[request.param](tmp_path_factory.mktemp(request.param))


def test_case_prefix_without_lookahead(written: tuple[str, Path]) -> None:
    """A = 1..8 that generates 20, 21 leaves 1..8, 20; B = 1..5, 10, 11, 12 then has 3 tokens left
    where layers can be cut, else all 8 and the branch at 5 to be captured.
    """
    name, folder = written
    drive = driver(folder)
    drive.run(A, GENERATED)
    row, start = drive.begin((*A, *GENERATED, 9))
    assert start.cached == len(A) + 1
    drive.prefix.leave(row, ())

    row, start = drive.begin(B)
    assert (start.total, start.matched) == (8, 5)
    if name in REWINDABLE:
        assert (start.left, start.reason) == (3, CacheReason.DIVERGED)
        assert drive.caches.contents.next_stop(row) is None
    else:
        assert (start.left, start.reason) == (8, CacheReason.NON_TRIMMABLE_DIVERGENCE)
        assert drive.prefill(row, B) == [5, 7]
    drive.prefix.leave(row, ())

    assert drive.run((*A[:5], 30, 31)).cached == 5


def test_case_prefix_that_repeats(written: tuple[str, Path]) -> None:
    """1..5 again: 1 token left where layers can be cut; else, where no state of it was captured,
    all 5 and one point to be captured.
    """
    name, folder = written
    drive = driver(folder)
    drive.run(A, GENERATED)

    row, start = drive.begin(A[:5])
    if name in REWINDABLE:
        assert (start.left, start.reason) == (1, CacheReason.NONE)
        assert drive.caches.contents.next_stop(row) is None
    else:
        assert (start.left, start.reason) == (5, CacheReason.NON_TRIMMABLE_DIVERGENCE)
        assert drive.prefill(row, A[:5]) == [4]
    drive.prefix.leave(row, ())
    assert drive.run(A[:5]).left == 1


@pytest.mark.parametrize("cut", range(1, 10))
def test_layers_that_can_be_cut_follow_to_the_exact_token(tmp_path: Path, cut: int) -> None:
    """A match that ends inside an edge is used to its last token (fault 12)."""
    drive = driver(write_dense_model(tmp_path))
    drive.run(A, GENERATED)
    kept = (*A, *GENERATED[:1])[:cut]
    assert drive.run((*kept, 99, 98)).cached == cut


def test_captured_states_of_a_cancelled_prefill_are_restore_points(
    written: tuple[str, Path],
) -> None:
    """Points that the prefill has crossed, and where it stopped, can be had again (fault 3)."""
    _, folder = written
    drive = driver(folder)
    prompt = tokens_of(1, 300)
    row, _ = drive.begin(prompt)
    drive.prefill(row, prompt, stop=200)
    drive.prefix.leave(row, ())

    assert drive.run((*prompt[:200], 7, 7)).cached == 200
    assert drive.run((*prompt[:70], 7, 7)).cached in {64, 70}
    assert drive.run(prompt).cached == 200


def test_the_last_states_of_generated_text_are_kept(written: tuple[str, Path]) -> None:
    """While it generates, a row captures at every multiple of 64 and keeps the last two."""
    name, folder = written
    drive = driver(folder)
    prompt, generated = tokens_of(1, 10), tokens_of(2, 300)
    drive.run(prompt, generated)

    held = len(prompt) + len(generated) - 1
    for departs in (held, held - 1, held - GRID_TOKENS, 200):
        said = (*prompt, *generated)[:departs]
        row, start = drive.begin((*said, 1, 1))
        expected = departs if departs == held else departs // GRID_TOKENS * GRID_TOKENS
        if name in REWINDABLE:
            expected = departs
        elif departs < held // GRID_TOKENS * GRID_TOKENS - (ROLLING_KEPT - 1) * GRID_TOKENS:
            expected = len(prompt) - 1
        assert start.cached == expected
        drive.prefix.leave(row, (), sound=False)


def test_a_running_row_holds_few_states(written: tuple[str, Path]) -> None:
    """However much it generates, a row has no more states than it keeps."""
    name, folder = written
    drive = driver(folder)
    prompt = tokens_of(1, 10)
    row, _ = drive.begin(prompt)
    drive.prefill(row, prompt)
    drive.decode(row, prompt[-1:])
    drive.prefix.publish(row)
    published = drive.caches.contents.book.live
    drive.decode(row, tokens_of(2, examples(400, few=200)))

    whole = {"standard": 0, "sliding": 1, "mixed": 1, "recurrent": 1}[name]
    assert drive.caches.contents.book.live == published + whole * ROLLING_KEPT
    drive.prefix.leave(row, (), sound=False)
    assert drive.prefix.nbytes == drive.caches.contents.book.nbytes


def test_a_row_whose_beginning_was_evicted_leaves_no_gap(written: tuple[str, Path]) -> None:
    """What a running row shares may be evicted meanwhile; what it leaves can still be used."""
    _, folder = written
    drive = driver(folder)
    prompt = tokens_of(1, 100)
    drive.run(prompt, GENERATED)
    longer = (*prompt, *tokens_of(2, 100))
    row, start = drive.begin(longer)
    assert start.cached >= 99
    drive.prefix.shrink(0)
    drive.prefill(row, longer)
    drive.prefix.leave(row, ())

    assert drive.run(longer).left == 1


def test_what_running_rows_captured_outlives_a_shrink(written: tuple[str, Path]) -> None:
    """A shrink takes what nobody uses; a row's own captures go with the row."""
    _, folder = written
    drive = driver(folder)
    prompt = tokens_of(1, 200)
    row, _ = drive.begin(prompt)
    drive.prefill(row, prompt, stop=190)
    before = drive.caches.contents.book.nbytes
    drive.prefix.shrink(0)
    assert drive.caches.contents.book.nbytes == before == drive.prefix.nbytes
    drive.prefix.leave(row, (), sound=False)
    assert drive.caches.contents.book.live == 0


@pytest.mark.parametrize("states", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("name", sorted(WRITERS.keys() - REWINDABLE))
def test_captures_never_exceed_the_budget(tmp_path: Path, name: str, states: float) -> None:
    """With room for few states, few are captured, or none; never more than the budget."""
    folder = WRITERS[name](tmp_path)
    state_nbytes = driver(folder).prefix.state_nbytes
    drive = driver(folder, budget_nbytes=int(states * state_nbytes))
    prompt = tokens_of(1, 300)
    row, _ = drive.begin(prompt)
    for stop in range(1, 300, 7):
        drive.prefill(row, prompt, stop=stop)
        assert drive.caches.contents.book.nbytes <= drive.prefix.budget_nbytes
    drive.prefix.leave(row, ())
    assert drive.caches.contents.book.nbytes <= drive.prefix.budget_nbytes
    assert drive.prefix.enabled == (states >= 1)


def test_a_chat_that_outgrows_the_budget_keeps_its_beginning(tmp_path: Path) -> None:
    """What is new never drives out what it goes on from: a turn finds as much as fits."""
    folder = write_dense_model(tmp_path)
    drive = driver(folder, budget_nbytes=200 * token_nbytes(folder))
    chat = tokens_of(1, CONTEXT)
    cached_counts = [drive.run(chat[:turn]).cached for turn in range(60, 460, 50)]

    assert cached_counts == [0, 59, 109, 159, 200, 200, 200, 200]
    assert drive.prefix.nbytes <= drive.prefix.budget_nbytes


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - REWINDABLE))
def test_states_that_could_not_stay_evict_nothing(tmp_path: Path, name: str) -> None:
    """A chat that has outgrown the budget never finds less than it did the turn before."""
    folder = WRITERS[name](tmp_path)
    states_nbytes = 6 * driver(folder).prefix.state_nbytes
    drive = driver(folder, budget_nbytes=150 * token_nbytes(folder) + states_nbytes)
    chat = tokens_of(1, CONTEXT)
    turns = range(50, 470, 40)
    cached_counts = [drive.run(chat[:turn], chat[turn : turn + 10]).cached for turn in turns]

    assert cached_counts == sorted(cached_counts)
    assert cached_counts[3] == 50 + 2 * 40 + 9


def test_what_running_rows_captured_leaves_no_room_for_others(tmp_path: Path) -> None:
    """Where other rows' captures fill the budget, nothing is copied only to be evicted."""
    folder = WRITERS["sliding"](tmp_path)
    drive = driver(folder, budget_nbytes=4 * driver(folder).prefix.state_nbytes)
    prompt = tokens_of(1, 300)
    row, _ = drive.begin(prompt)
    drive.prefill(row, prompt)
    assert drive.prefix.nbytes == drive.prefix.budget_nbytes

    drive.run(tokens_of(2, 100), GENERATED)
    assert drive.prefix.counts.evictions == 0
    assert drive.prefix.nbytes == drive.prefix.budget_nbytes
    drive.prefix.leave(row, ())
    assert drive.prefix.nbytes <= drive.prefix.budget_nbytes


def test_a_second_look_up_names_why_it_found_no_more(tmp_path: Path) -> None:
    """None where it is new, diverged where another goes on, evicted where it was there once."""
    drive = driver(write_dense_model(tmp_path))
    prompt = tokens_of(1, 100)
    assert drive.run(prompt).reason is CacheReason.NONE
    assert drive.run((*prompt, *tokens_of(2, 9))).reason is CacheReason.NONE
    assert drive.run((*prompt[:50], *tokens_of(3, 9))).reason is CacheReason.DIVERGED
    drive.prefix.shrink(0)
    start = drive.run((*prompt[:70], *tokens_of(4, 9)))
    assert (start.cached, start.reason) == (0, CacheReason.EVICTED)
    start = drive.run((*prompt[:70], *tokens_of(5, 9)))
    assert (start.cached, start.reason) == (70, CacheReason.DIVERGED)
