"""Rotation in operations of our own: what MLX's does, with the angles of a pass made once."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.families.common.rope import RopeConfig
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.layers.llama_layers import Rotation

DIMS = 16
OFFSETS = (0, 3, 77, 4000)
PERIODS = [3.0 ** (i + 1) for i in range(DIMS // 2)]


def plan_of(width: int) -> StepPlan:
    """Return a plan of one row: what passes keep is all that counts here."""
    geometry = AttentionGeometry(kv_heads=1, head_dim=DIMS, window=None)
    layer = geometry.new_cache(mx.float32, kv=KVFormat.MODEL, context_max=512)
    caches = RowCaches([layer], context_max=512, rows_max=1)
    caches.join(RowId(1), tokens=width)
    return caches.plan(
        (RowId(1),),
        offsets=mx.array([0], dtype=mx.int32),
        lengths=(width,),
        width=width,
        dtype=mx.float32,
    )


def rotation_with(*, table: bool, interleaved: bool = False, scale: float = 1.0) -> Rotation:
    """Return a rotation by a base or by a table."""
    config = RopeConfig(base=10000.0, interleaved=interleaved, position_scale=scale)
    return Rotation(config, DIMS, mx.array(PERIODS) if table else None)


def heads_of(width: int, head_dim: int = DIMS) -> mx.array:
    """Return queries that lie as a layer makes them: heads inside of positions."""
    heads = mx.random.normal((len(OFFSETS), width, 5, head_dim), key=mx.random.key(width))
    return heads.transpose(0, 2, 1, 3)


@pytest.mark.parametrize("width", [1, 9])
@pytest.mark.parametrize("table", [False, True], ids=["base", "table"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_heads_turn_as_mlx_turns_them(width: int, table: bool, scale: float) -> None:
    """Each row from its own position on; a scale stretches positions."""
    rotation, heads = rotation_with(table=table, scale=scale), heads_of(width)
    offsets = mx.array(OFFSETS, dtype=mx.int32)

    rotated = rotation(heads, offsets, plan_of(width))

    expected = mx.fast.rope(
        heads,
        DIMS,
        traditional=False,
        base=None if table else 10000.0,
        scale=scale,
        offset=offsets,
        freqs=mx.array(PERIODS) if table else None,
    )
    # A position in the thousands has its angle to 1e-4 of a radian in float32.
    assert mx.allclose(rotated, expected, rtol=0, atol=2e-3)
    assert mx.allclose(rotated[:2], expected[:2], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("interleaved", "head_dim", "dtype"),
    [(True, DIMS, mx.float32), (False, DIMS + 8, mx.float32), (False, DIMS, mx.bfloat16)],
    ids=["interleaved", "a part of the head", "halves"],
)
def test_what_is_not_ours_is_mlx_s(interleaved: bool, head_dim: int, dtype: mx.Dtype) -> None:
    """Other kinds of heads come out as before, to the bit."""
    rotation, offsets = rotation_with(table=False, interleaved=interleaved), mx.array(OFFSETS)
    heads = heads_of(1, head_dim).astype(dtype)

    rotated = rotation(heads, offsets, plan_of(1))

    assert mx.array_equal(
        rotated,
        mx.fast.rope(heads, DIMS, traditional=interleaved, base=10000.0, scale=1.0, offset=offsets),
    )


@pytest.mark.skipif(not runs_cpu(), reason="elsewhere MLX turns them in one operation")
def test_layers_share_their_pass_s_angles(tmp_path: Path) -> None:
    """Sines and cosines are made once, however many layers turn by them."""
    rotation, plan = rotation_with(table=False), plan_of(1)
    offsets = mx.array(OFFSETS, dtype=mx.int32)
    turned = heads_of(1)
    for _ in range(4):
        turned = rotation(turned, offsets, plan)

    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), turned)

    assert len(re.findall(r'label ?= ?"Cos"', graph.read_text())) == 1
