"""How much of a prompt is one chunk, and by what it is read."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxd_worker.cache.layers.attention import CAUSAL_WARMED, CAUSAL_WIDTHS
from mlxd_worker.cache.layers.kv import KVCache, copies_all
from mlxd_worker.cache.layers.tokens import TOKEN_SIZES
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Image
from mlxd_worker.engine.stepping.chunking import Chunking
from mlxd_worker.models.base import Capabilities, Model
from tests.support.clocks import Clock
from tests.worker.engine.test_joining_ahead import (
    CONTEXT,
    ROWS_MAX,
    Served,
    alone,
    prompt_of,
)
from tests.worker.in_place import Copying, compiled_in_place
from tests.worker.tiny import config_with, load, write_model

LEAST, MOST = CAUSAL_WIDTHS[0], CAUSAL_WIDTHS[-1]
BY_KERNELS = Chunking(in_place=TOKEN_SIZES[-1], copies=True)
BY_MASKS = Chunking(in_place=TOKEN_SIZES[-1], copies=False)


@pytest.mark.parametrize(
    ("offset", "tokens", "chunk"),
    [
        (0, MOST, MOST),
        (0, 1500, 1500),
        (LEAST, MOST, LEAST),
        (2 * LEAST, MOST, 2 * LEAST),
        (2000, MOST, 48),
        (2000, 128, 128),
        (20_000, 8, 8),
    ],
)
def test_long_chunks_are_cut_where_layers_copy(offset: int, tokens: int, chunk: int) -> None:
    """Not what a pass in place reads, nor far behind, nor where a mask is used in any case."""
    where = {"wanted": 2 * MOST if offset < MOST else MOST, "capacity": 1 << 15}
    assert BY_KERNELS.fit((), offset, tokens, **where) == chunk
    assert BY_MASKS.fit((), offset, tokens, **where) == tokens


def test_a_prompt_that_ends_far_behind_is_not_cut() -> None:
    """There each place is a shape of its own, and the masks of the way before are not."""
    left = CAUSAL_WARMED - LEAST
    assert BY_KERNELS.fit((), LEAST, MOST, wanted=left, capacity=1 << 15) == LEAST
    assert BY_KERNELS.fit((), LEAST, MOST, wanted=left + 1, capacity=1 << 15) == MOST


def test_an_image_that_sees_itself_stays_whole() -> None:
    """Its places see each other, so there is a mask anyway; another one's are as a text's."""
    image = Image(b"seen", start=LEAST - 100, tokens=200, pixels=b"", whole=True)
    where = {"wanted": 2 * MOST, "capacity": 1 << 15}

    for chunking in (BY_KERNELS, BY_MASKS):
        assert chunking.fit((image,), 0, LEAST, **where) == LEAST - 100
        assert chunking.fit((image,), LEAST - 100, LEAST, **where) == LEAST
    other = replace(image, whole=False)
    assert BY_KERNELS.fit((other,), LEAST, MOST, **where) == LEAST


def test_only_standard_layers_with_kernels_copy() -> None:
    """One that does not is enough for masks; so is one that keeps nothing of the kind."""
    able, other = (kind(kv_heads=1, head_dim=64, dtype=mx.float32) for kind in (Copying, KVCache))
    assert copies_all([able, able])
    assert not copies_all([able, other])
    assert not copies_all([able, None])
    for layer, in_place, copies in ((able, True, True), (other, True, False), (able, False, False)):
        caches = RowCaches(
            [layer], context_max=64, rows_max=1, bounded_shapes=True, in_place=in_place
        )
        assert Chunking.of(Capabilities(), caches).copies is copies


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with()))


def test_a_long_prompt_waits_for_more_than_a_piece(model: Model) -> None:
    """Those that end with a step have it; the longest begins with the next one, at a chunk."""
    passes, caches = compiled_in_place(model, context_max=CONTEXT, rows_max=ROWS_MAX, kind=Copying)
    served = Served(passes, caches, clock=Clock(tick_s=1e-7))
    mx.disable_compile()
    try:
        served.submit(prompt_of(1, 900))
        served.engine.step()
        sinks = [
            served.submit(prompt_of(number, tokens))
            for number, tokens in ((2, 400), (3, 900), (4, 990))
        ]
        served.engine.step()
        rows = sorted(served.engine._rows.values(), key=lambda row: row.id)
        offsets = [row.offset for row in rows]
        served.finish()
    finally:
        mx.enable_compile()

    assert offsets == [900, 400, 900, 0], "those that ended have decoded"
    assert sinks[-1].ids == alone(model, prompt_of(4, 990))
