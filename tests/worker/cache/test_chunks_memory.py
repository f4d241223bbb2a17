"""What prompts in company take at their peak: no more than the fit has for a prompt alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.sizes.pass_sizes import together_max
from mlxd_worker.cache.arenas.chunks import Attended
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model
from mlxd_worker.models.loader import inspect_model
from tests.bench.models import Shape
from tests.support.mlx_memory import live_nbytes
from tests.support.random_model import write_dense_model
from tests.worker.tiny import load

CONTEXT = 2048
NARROW = Shape(hidden=64, layers=2, heads=8, kv_heads=8, mlp=64, context=CONTEXT)
WIDE = Shape(hidden=384, layers=2, heads=2, kv_heads=2, mlp=64, context=CONTEXT)
"""Heads of 192 values, without any that share keys: copies of keys take most beside scores."""
REPEATS = 3
"""How far the evaluator runs ahead is a matter of timing: the least of these counts."""


@pytest.fixture(scope="module", name="folder", params=[NARROW, WIDE], ids=["narrow", "wide"])
def _folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_dense_model(tmp_path_factory.mktemp("model"), shape=request.param)


def peak_of(model: Model, *, rows: int, start: int, tokens: int) -> int:
    """Return the bytes that a pass of such chunks takes, of every second row of an arena."""
    caches = RowCaches(model.new_caches(), context_max=CONTEXT, rows_max=2 * rows)
    numbers = range(1, 2 * rows, 2)
    for number in range(2 * rows):
        assert caches.join(RowId(number), tokens=start + tokens, coming=2 * rows)
    if start:
        for number in numbers:
            model.forward(Batch.prefill([number] * start, 0, RowId(number)), caches)
            mx.eval(caches.state())
    before = live_nbytes()
    parts = [([5] * tokens, start, RowId(number)) for number in numbers]
    mx.eval(model.forward(Batch.chunks(parts), caches), caches.state())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(
    ("rows", "start", "tokens", "within"),
    [(4, 0, 127, True), (16, 96, 32, True), (2, 960, 64, True), (16, 896, 128, False)],
)
def test_chunks_take_no_more_than_is_planned(
    folder: Path, rows: int, start: int, tokens: int, *, within: bool
) -> None:
    """Where the engine may read them together; where it may not, they would take more."""
    footprint = inspect_model(folder).footprint
    planned = footprint.passes.nbytes(
        footprint.caches, context=CONTEXT, rows=rows, item_nbytes=4, on_cpu=True
    )
    attended = Attended()
    for _ in range(rows):
        attended = attended.beside(tokens, start + tokens)
    assert attended.within(together_max(CONTEXT, on_cpu=True)) is within

    model = load(folder)
    peak = min(peak_of(model, rows=rows, start=start, tokens=tokens) for _ in range(REPEATS))

    assert (peak <= planned) is within
