"""What a prompt takes in windows does not grow with the layers: each layer's part goes with it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlxd_worker.cache.base import RowId
from mlxd_worker.models.base import Batch
from tests.bench.models import Shape
from tests.support.mlx_memory import live_nbytes
from tests.support.random_model import write_sliding_model
from tests.worker.tiny import caches_of, load

WIDTH = 512
JOINED = (8 + 2 * 4) * 8
"""Queries, keys and values of one position."""
AHEAD = 4
"""Of so many layers the evaluator may have begun what is not written yet."""


def peak_of_a_prompt(folder: Path, *, layers: int) -> int:
    """Return the bytes that a chunk that wraps takes at its peak, beyond the caches."""
    shape = Shape(hidden=64, layers=layers, heads=8, kv_heads=4, mlp=64, context=1024)
    model = load(write_sliding_model(folder, window=64, mixed=False, shape=shape))
    caches = caches_of(model, rows_max=1)
    caches.join(RowId(0), tokens=WIDTH)
    before = live_nbytes()
    hidden = model.forward(Batch.prefill([5] * WIDTH, 0, RowId(0)), caches)
    mx.eval(hidden, caches.state())
    return mx.get_peak_memory() - before


def test_more_layers_do_not_keep_more_projections(tmp_path: Path) -> None:
    """A layer's ring is written before the next layer runs: what is written is a view of more."""
    # How far the evaluator runs ahead is a matter of timing: the least of a few.
    few, many = (
        min(peak_of_a_prompt(tmp_path / f"{layers}-{n}", layers=layers) for n in range(3))
        for layers in (2, 12)
    )

    assert many - few < AHEAD * WIDTH * JOINED * 4  # ten layers' more, if they were kept
