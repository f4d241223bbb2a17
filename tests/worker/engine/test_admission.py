"""What rows hold never exceeds what a load reserves for them, and a bug that says so is loud."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.admission import KVOverrun, check_join
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.loader import inspect_model
from tests.support.effort import SAME_EACH_TIME, examples
from tests.support.engines import tiny_engine
from tests.support.remembering import MEMORIES
from tests.worker.engine.test_loop import prompt_of

HEADS, WIDTH, WINDOW = 1, 32, 300
FLOAT_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Mixed:
    """Caches of a layer with a window, and maybe of one that remembers all; what they may take."""

    caches: RowCaches
    nbytes_max: int


def make_mixed(
    *, rows_max: int, context_max: int, kv: KVFormat, keeps_spares: bool, whole: bool = True
) -> Mixed:
    """Return such caches, and what a load reserves for them."""
    layers = [AttentionGeometry(HEADS, WIDTH)] * whole + [AttentionGeometry(HEADS, WIDTH, WINDOW)]
    layer_caches = [layer.new_cache(mx.float32, kv=kv, context_max=context_max) for layer in layers]
    each = 2 * HEADS * WIDTH
    sizes = CacheSizes(
        kv_values_per_token=each * whole,
        kv_heads=HEADS,
        head_dim=WIDTH,
        windows=(WindowedLayers(WINDOW, each),),
    )
    held = sizes.most_held(
        context_max=context_max, rows_max=rows_max, kv_format=kv, on_cpu=runs_cpu()
    )
    caches = RowCaches(
        layer_caches, context_max=context_max, rows_max=rows_max, keeps_spares=keeps_spares
    )
    return Mixed(caches, held.nbytes(FLOAT_NBYTES))


@settings(max_examples=examples(25), deadline=None, derandomize=SAME_EACH_TIME)
@given(
    rows_max=st.integers(1, 12),
    context_max=st.sampled_from([256, 700, 1024, 2048]),
    kv=st.sampled_from([KVFormat.MODEL, KVFormat.Q8]),
    whole=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_what_is_reserved_holds_any_rows(
    rows_max: int, context_max: int, kv: KVFormat, *, whole: bool, seed: int
) -> None:
    """However rows come, grow and leave: no join and no growth exceeds what the load reserved."""
    draws = random.Random(seed)
    its = make_mixed(
        rows_max=rows_max,
        context_max=context_max,
        kv=kv,
        keeps_spares=seed % 2 == 0,
        whole=whole,
    )
    tokens: dict[RowId, int] = {}
    for number in range(150):
        verb = draws.choice(["join", "join", "grow", "grow", "leave", "tend"])
        if verb == "join" and len(tokens) < rows_max:
            length = draws.randint(1, draws.choice([20, 300, context_max]))
            length, coming = min(length, context_max), draws.randint(1, rows_max)
            check_join(its.caches, tokens=length, coming=coming, nbytes_max=its.nbytes_max)
            if its.caches.join(RowId(number), tokens=length, coming=coming):
                tokens[RowId(number)] = length
        elif verb == "grow" and tokens:
            grown = {
                row: min(held + draws.randint(1, 400), context_max)
                for row, held in tokens.items()
                if draws.random() < 0.5
            }
            its.caches.reserve_all(grown)
            tokens |= grown
        elif verb == "leave" and tokens:
            row = draws.choice(list(tokens))
            del tokens[row]
            its.caches.leave(row)
        else:
            its.caches.tend()
        assert its.caches.nbytes <= its.nbytes_max


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_engine_stays_within_what_is_reserved(memory: str, tmp_path: Path) -> None:
    """With every kind of memory, more streams than rows, of all lengths, to the end."""
    folder = MEMORIES[memory](tmp_path)
    tiny = tiny_engine(folder, rows_max=3, context_length=512)
    sizes = inspect_model(folder).footprint.caches
    held = sizes.most_held(context_max=512, rows_max=3, kv_format=KVFormat.MODEL, on_cpu=runs_cpu())
    nbytes_max = held.nbytes(FLOAT_NBYTES)
    tiny.engine.limits = replace(tiny.engine.limits, kv_nbytes_max=nbytes_max)
    for n, length in enumerate([5, 300, 250, 20, 511, 260, 1]):
        tiny.submit(prompt_of(n, length), max_tokens=12)

    most = 0
    while tiny.engine.busy:
        tiny.engine.step()
        most = max(most, tiny.caches.nbytes)
    assert 0 < most <= nbytes_max


def test_a_join_beyond_what_is_reserved_ends_the_loop_by_name(tmp_path: Path) -> None:
    """It is a bug, so it leaves the step; the error has all figures."""
    tiny = tiny_engine(MEMORIES["standard"](tmp_path), rows_max=2, context_length=512)
    grown = tiny.caches.join_nbytes(5)
    tiny.engine.limits = replace(tiny.engine.limits, kv_nbytes_max=grown - 1)
    tiny.submit(prompt_of(1, 5))

    with pytest.raises(KVOverrun, match=f"{grown} bytes beside 0 exceeds the {grown - 1} reserved"):
        tiny.engine.step()
    assert tiny.caches.rows == ()
