"""What is run before READY: every shape that requests will take, and within what was reserved."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.sizes.arena_sizes import kv_tokens_bound
from mlxd_models.sizes.pass_sizes import POOL_NBYTES
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import InvalidModel, ModelUnloaded
from mlxd_shared.domain.requests import KVFormat, LoadSpec
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import LayerCache, RowError, RowId
from mlxd_worker.cache.layers.attention import CAUSAL_WIDTHS, CHUNK_WIDTHS, Asked, causal_width
from mlxd_worker.cache.layers.kinds import AttentionGeometry, as_attention
from mlxd_worker.cache.layers.shapes import WIDE_WIDTH, AttentionShape
from mlxd_worker.cache.layers.tokens import is_read_in_place
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.warm_up import chunks_to_warm, warm_shapes
from mlxd_worker.models.base import Batch, Capabilities
from mlxd_worker.thread.facts import LoadJob
from mlxd_worker.thread.host import ModelHost
from tests.support.tiny_model import write_tiny_model
from tests.worker.cache.pass_shapes import shapes_of

WINDOW = 300


class Seen:
    """A model that notes what it is run with: shapes, positions, and the bytes of its caches."""

    capabilities = Capabilities()
    vocab_size = 4
    context_max = 1024
    dtype = mx.float32
    attention: tuple[AttentionGeometry | None, ...] = (
        AttentionGeometry(1, 4),
        None,
        AttentionGeometry(1, 4, window=WINDOW),
    )

    def __init__(self) -> None:
        self.shapes: set[AttentionShape] = set()
        self.beyond_window: set[int] = set()
        self.tokens_most = 0
        self.headed = 0

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches."""
        longest = self.context_max if context_max is None else context_max
        return [
            None if geometry is None else geometry.new_cache(self.dtype, kv=kv, context_max=longest)
            for geometry in self.attention
        ]

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Attend, with values that say nothing."""
        assert isinstance(caches, RowCaches), "whole caches, not some slots of them"
        plan = caches.plan(
            batch.rows,
            offsets=batch.offsets,
            lengths=batch.lengths,
            width=batch.width,
            dtype=self.dtype,
        )
        self.shapes |= shapes_of(plan)
        self.tokens_most = max(self.tokens_most, caches.table.tokens)
        if batch.lengths[0] - batch.width > WINDOW:
            self.beyond_window |= {shape.width for shape in shapes_of(plan)}
        rows = mx.zeros((len(batch.rows), 1, batch.width, 4))
        for cache in caches.layers:
            if cache is not None:
                as_attention(cache).attend(Asked(rows, rows, rows, plan, 1.0))
        return rows.reshape(-1, 4)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the hidden rows."""
        self.headed += 1
        return hidden

    def parameters(self) -> Mapping[str, mx.array]:
        """Return none."""
        return {}


@pytest.mark.parametrize(("context_max", "rows_max"), [(1024, 3), (1024, 16), (300, 7), (20, 1)])
def test_every_shape_is_run_before_ready(context_max: int, rows_max: int) -> None:
    """Each shape is run once, none that is not listed; windows also where they have gone around;
    nothing is left, and never was more held than all rows at full length take.
    """
    model = Seen()
    caches = RowCaches(
        model.new_caches(context_max=context_max),
        context_max=context_max,
        rows_max=rows_max,
        bounded_shapes=True,
    )

    count = warm_shapes(model, caches)

    possible = {s for s in caches.shapes() if s.width <= CHUNK_WIDTHS[0] or context_max > 64}
    assert model.shapes == possible
    assert count == len(caches.shapes())
    assert model.headed == sum(shape.width in (1, WIDE_WIDTH) for shape in possible)
    assert model.tokens_most == kv_tokens_bound(context_max, rows_max)
    assert model.beyond_window == (set(CHUNK_WIDTHS) if context_max > 512 else set())
    assert (caches.rows, caches.nbytes, caches.contents.book.live) == ((), 0, 0)


class SeenTogether(Seen):
    """One whose passes may be several rows' chunks, which it notes."""

    capabilities = Capabilities(reads_chunks=True)
    attention = (AttentionGeometry(1, 4),)

    def __init__(self) -> None:
        super().__init__()
        self.neighbours: list[bool] = []

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Attend, and note whether the rows of a pass over chunks lie side by side."""
        if not batch.counts:
            return super().forward(batch, caches)
        plan = caches.plan(
            batch.rows,
            offsets=batch.offsets,
            lengths=batch.lengths,
            width=batch.width,
            dtype=self.dtype,
            counts=batch.counts,
        )
        (group,) = plan.groups
        assert group.chunks is not None
        self.neighbours.append(isinstance(group.chunks.slots, slice))
        rows = mx.zeros((sum(batch.counts), 1, 1, 4))
        for cache in caches.layers:
            as_attention(cache).attend(Asked(rows, rows, rows, plan, 1.0))
        return rows.reshape(-1, 4)


@pytest.mark.parametrize(("rows_max", "neighbours"), [(1, []), (2, [True]), (8, [True, False])])
def test_prompts_are_read_together_before_ready(rows_max: int, neighbours: list[bool]) -> None:
    """Of two rows that lie side by side, and of two that do not; nothing is left."""
    model = SeenTogether()
    caches = RowCaches(model.new_caches(), context_max=1024, rows_max=rows_max, bounded_shapes=True)

    warm_shapes(model, caches)

    assert model.neighbours == neighbours
    assert model.tokens_most == kv_tokens_bound(1024, rows_max)
    assert (caches.rows, caches.nbytes, caches.contents.book.live) == ((), 0, 0)


def test_no_request_takes_another_shape() -> None:
    """Random rows after the warm-up, for hundreds of steps, take nothing but what was run."""
    model, draws = Seen(), random.Random(3)
    caches = RowCaches(model.new_caches(), context_max=1024, rows_max=8, bounded_shapes=True)
    warm_shapes(model, caches)
    warmed = set(model.shapes)
    lengths: dict[RowId, int] = {}

    for number in range(200):
        row, tokens = RowId(number), draws.randint(1, 900)
        if len(lengths) < 8 and caches.join(row, tokens=tokens):
            model.forward(Batch.prefill([0] * tokens, 0, row), caches)
            mx.eval(caches.state())
            lengths[row] = tokens
        rows = [row for row in caches.rows if lengths[row] < 1024]
        if rows:
            caches.reserve_all({row: lengths[row] + 1 for row in rows})
            model.forward(
                Batch.decode([0] * len(rows), [lengths[row] for row in rows], rows), caches
            )
            mx.eval(caches.state())
            for row in rows:
                lengths[row] += 1
        if draws.random() < 0.4:
            gone = draws.choice(list(lengths))
            caches.leave(gone)
            del lengths[gone]
        caches.tend()

    assert model.shapes == warmed


def test_where_nothing_is_keyed_nothing_is_run() -> None:
    """On a CPU there is nothing to warm."""
    model = Seen()
    caches = RowCaches(model.new_caches(), context_max=256, rows_max=2, bounded_shapes=False)

    assert warm_shapes(model, caches) == 0
    assert model.shapes == set()


def test_a_rehearsal_is_of_known_shapes_and_alone() -> None:
    """Neither a shape that rows never see nor one beside other rows is opened."""
    caches = RowCaches([], context_max=1024, rows_max=4)

    for capacity, slots in [(300, 1), (256, 3), (256, 8), (2048, 1)]:
        with pytest.raises(RowError):
            caches.rehearse(RowId(0), capacity=capacity, slots=slots)
    caches.join(RowId(0), tokens=1)
    with pytest.raises(RowError, match="beside 1 rows"):
        caches.rehearse(RowId(1), capacity=256, slots=1)


def pool_limit() -> int:
    """Return what MLX may keep of freed buffers."""
    limit = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(limit)
    return limit


def test_the_pool_is_bounded_while_a_model_is_there(tmp_path: Path) -> None:
    """MLX keeps of freed buffers what the plan reckons with, and on a CPU evaluates ahead into no
    more memory than that says; and as before afterwards, whether the load succeeded or not.
    """
    before, whole = mx.set_cache_limit(77 << 20), mx.get_memory_limit()
    kind = choose_backend(installed_versions(), platform=sys.platform).kind
    try:
        host = ModelHost(device=kind)
        folder = write_tiny_model(tmp_path / "good")
        broken = write_tiny_model(tmp_path / "broken")
        (broken / "model.safetensors").write_bytes(b"nothing")

        host.load(
            LoadJob(folder, "tiny", "d" * 64, LoadSpec(prefix_cache_nbytes=0)), lambda _: None
        )
        assert pool_limit() == POOL_NBYTES
        if kind is DeviceKind.CPU:
            assert mx.get_memory_limit() < 1 << 30
        host.unload(ModelUnloaded("tiny"))
        assert pool_limit() == 77 << 20
        assert mx.get_memory_limit() == whole
        with pytest.raises(InvalidModel):
            host.load(LoadJob(broken, "tiny", "d" * 64, LoadSpec()), lambda _: None)
        assert pool_limit() == 77 << 20
        assert mx.get_memory_limit() == whole
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize("in_place", [0, 128, 2048])
def test_each_shape_of_a_long_prompt_s_chunk_is_run(in_place: int) -> None:
    """Under a mask one of each span and width; without, each width at its multiples, and padded.

    Also the last ones, whose padding ends behind the context: a row's place is a whole span.
    """
    spans, context = (512, 1024, 2048, 4096), 4000
    masked = chunks_to_warm(spans, context, in_place=in_place, causal=False)
    both = chunks_to_warm(spans, context, in_place=in_place, causal=True)

    causal = {
        (width, begin + width)
        for begin, count in both
        if (width := causal_width(begin, count, spans[-1])) is not None
    }
    wanted = {
        (width, begin + width)
        for width in CAUSAL_WIDTHS
        for begin in range(0, spans[-1], width)
        if not is_read_in_place([begin + width], [width], most=in_place)
    }
    assert wanted <= causal

    def shapes_under_masks(chunks: list[tuple[int, int]]) -> set[tuple[int, int]]:
        begun = [(begin, width) for begin, width in chunks if begin]
        return {(width, next(s for s in spans if s >= begin + width)) for begin, width in begun}

    others = [each for each in both if causal_width(*each, spans[-1]) is None]
    assert shapes_under_masks(masked) == shapes_under_masks(others)
    assert all(begin >= 0 and begin + width <= context for begin, width in both)


@pytest.mark.parametrize("causal", [False, True])
def test_a_span_whose_end_is_read_in_place_may_still_be_met(*, causal: bool) -> None:
    """By a chunk of the whole context, though none of the usual widths is read by products."""
    assert is_read_in_place([768], [512], most=2048)
    assert not is_read_in_place([767], [766], most=2048)

    chunks = chunks_to_warm((512, 768), 768, in_place=2048, causal=causal)

    assert chunks == [(1, 767)]
    assert not chunks_to_warm((512,), 512, in_place=2048, causal=causal), "no chunk is so long"
