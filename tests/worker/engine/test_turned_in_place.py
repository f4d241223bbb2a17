"""Rows behind images that keep their shape decode by the steps that all others decode by.

Kernels that write in place exist on a GPU alone; a cache does here what they do (`in_place`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Batch, Model, shift_all
from tests.support import qwen3_vl_cases, qwen_vl_cases
from tests.support.probing import Probe
from tests.support.qwen_vl_cases import Case
from tests.support.shown import Shown, read, shown_by
from tests.worker.in_place import compiled_in_place
from tests.worker.tiny import difference, load

CONTEXT = 128
ROWS_MAX = 4
CLOSE = 5e-5
SEEN, TEXT, OTHER = RowId(1), RowId(2), RowId(3)
"""A row behind three images, one of text, and another behind images."""
_BY_NAME = {case.name: case for case in (*qwen_vl_cases.CASES, *qwen3_vl_cases.CASES)}


@pytest.fixture(autouse=True)
def _traced_each_time() -> Iterator[None]:
    """Run what would be compiled as it is written: a CPU's compiler is not what is tested."""
    mx.disable_compile()
    yield
    mx.enable_compile()


class Watched(Probe):
    """A model that knows which of its passes were a compiled function's."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        self.capabilities = inner.capabilities
        self.traced: list[bool] = []

    def forward(self, batch: Batch, caches: Any) -> mx.array:
        """Run the inner model."""
        self.traced.append(not isinstance(caches, RowCaches))
        return super().forward(batch, caches)


@dataclass
class Pair:
    """A model as it is, and the same compiled, over the same three prompts."""

    model: Model
    watched: Watched
    compiled: CompiledModel
    plain_caches: RowCaches
    caches: RowCaches
    shifts: Mapping[RowId, int]
    offsets: dict[RowId, int] = field(default_factory=dict)

    def step(self, rows: list[RowId], tokens: list[list[int]]) -> None:
        """Let rows have these tokens in one pass, which is a compiled one: equal results."""
        width = len(tokens[0])
        offsets = [self.offsets[row] for row in rows]
        batch = Batch(
            tokens=mx.array(tokens, dtype=mx.int32),
            offsets=mx.array(offsets, dtype=mx.int32),
            lengths=tuple(offset + width for offset in offsets),
            rows=tuple(rows),
            turns=shift_all(offsets, [self.shifts[row] for row in rows]),
        )
        results = []
        self.watched.traced.clear()
        for runs, caches in ((self.model, self.plain_caches), (self.compiled, self.caches)):
            caches.reserve_all(dict(zip(batch.rows, batch.lengths, strict=True)))
            results.append(self.model.logits(runs.forward(batch, caches)))
            mx.eval(results[-1], caches.state())
        assert self.watched.traced == [True]
        assert difference(*results) < CLOSE
        chosen, same = (mx.argmax(result, axis=-1) for result in results)
        assert mx.array_equal(chosen, same)
        self.offsets |= dict(zip(rows, batch.lengths, strict=True))


def pair_of(case: Case, folder: Path, *, in_place: bool) -> Pair:
    """Return a case's model with three prompts read, in place or in arenas by class."""
    model = load(case.write(folder))
    watched = Watched(model)
    plain_caches, caches = (
        RowCaches(
            model.new_caches(context_max=CONTEXT),
            context_max=CONTEXT,
            rows_max=ROWS_MAX,
            bounded_shapes=True,
        )
        for _ in range(2)
    )
    if in_place:
        compiled, caches = compiled_in_place(watched, context_max=CONTEXT, rows_max=ROWS_MAX)
    else:
        compiled = CompiledModel(watched, caches)
    shown = shown_by(model, folder, case)
    prompts = {SEEN: shown, TEXT: Shown((9, 8, 7, 100, 101, 55)), OTHER: shown}
    assert shown.shift < 0
    for row, prompt in prompts.items():
        read(model, plain_caches, prompt, [len(prompt.prompt)], row)
        read(model, caches, prompt, [len(prompt.prompt)], row)
    shifts = {row: prompt.shift for row, prompt in prompts.items()}
    pair = Pair(model, watched, compiled, plain_caches, caches, shifts)
    pair.offsets |= {row: len(prompt.prompt) for row, prompt in prompts.items()}
    return pair


@pytest.mark.parametrize("name", ["windows-and-full", "yarn", "deep"])
def test_a_step_takes_a_prompt_along_beside_rows_behind_images(name: str, tmp_path: Path) -> None:
    """The rows turn by where they stand behind their images, the prompt by its positions."""
    pair = pair_of(_BY_NAME[name], tmp_path / "model", in_place=True)
    step = Batch.decode([44], [pair.offsets[SEEN]], [SEEN], shifts=[pair.shifts[SEEN]])
    chunk = ((9, 17, 100, 4, 55), pair.offsets[TEXT], TEXT)
    lengths = {SEEN: pair.offsets[SEEN] + 1, TEXT: pair.offsets[TEXT] + len(chunk[0])}
    for caches in (pair.plain_caches, pair.caches):
        caches.reserve_all(lengths)
    apart = mx.concatenate(
        [pair.model.forward(one, pair.plain_caches) for one in (step, Batch.prefill(*chunk))]
    )
    together = pair.compiled.forward(step.beside([chunk]), pair.caches)
    assert pair.watched.traced[-1]
    assert difference(pair.model.logits(apart), pair.model.logits(together)) < CLOSE


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ["windows-and-full", "yarn", "deep"])
def test_a_step_is_compiled_whoever_stands_elsewhere(
    name: str, tmp_path: Path, *, in_place: bool
) -> None:
    """Behind images, beside text, alone, in any order, with copies that fill the step, and rows
    that wait: the tokens of the model's own passes."""
    pair = pair_of(_BY_NAME[name], tmp_path / "model", in_place=in_place)
    pair.step([SEEN, TEXT, OTHER], [[44], [13], [75]])
    pair.step([TEXT], [[7]])
    pair.step([OTHER], [[90]])
    pair.step([OTHER, SEEN], [[3], [211]])
    pair.step([TEXT, OTHER, SEEN], [[60], [61], [62]])
    if in_place:
        # As rows that guess have it: several tokens of each.
        pair.step([SEEN, TEXT], [[5, 17, 9], [8, 100, 2]])
        pair.step([OTHER], [[5, 17, 9]])
    pair.step([SEEN, TEXT, OTHER], [[1], [2], [3]])


def test_what_shows_an_image_is_the_models_own_pass(tmp_path: Path) -> None:
    """Three numbers a token are in no compiled pass; the text behind images is, in place."""
    case = _BY_NAME["windows-and-full"]
    pair = pair_of(case, tmp_path / "model", in_place=True)
    shown = shown_by(pair.model, tmp_path / "model", case)
    row = RowId(9)
    pair.watched.traced.clear()
    # The last piece is text of four tokens, and stands by what is before.
    logits = read(pair.compiled, pair.caches, shown, [len(shown.prompt) - 4], row)
    assert pair.watched.traced == [False, True]
    expected = read(pair.model, pair.plain_caches, shown, [len(shown.prompt)], row)
    assert difference(logits, expected) < CLOSE
