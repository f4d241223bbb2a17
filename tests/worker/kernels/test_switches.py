"""A path that is switched off is not taken, wherever it would have been; others are."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.ahead import Lead
from mlxd_worker.engine.stepping.choose import Way, compile_steps, way_of
from mlxd_worker.engine.stepping.chunking import reads_together
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.exponentials import by_powers
from mlxd_worker.kernels.switches import SWITCHES, Switches
from mlxd_worker.machine.lanes import LANE_VALUES_MIN, lanes, side_by_side
from mlxd_worker.models.base import Capabilities
from tests.worker.tiny import config_with, load, write_model

DENSE = Capabilities(on_cpu=True, stays_lazy=True, joins_passes=True, reads_chunks=True)


def caches() -> RowCaches:
    """Return the caches of one layer that keeps every position."""
    layer = AttentionGeometry(1, 32).new_cache(mx.float32, kv=KVFormat.MODEL, context_max=64)
    return RowCaches([layer], context_max=64, rows_max=2, bounded_shapes=False)


def test_all_are_on_until_they_are_switched_off() -> None:
    """For good, or while a body runs."""
    switches = Switches()
    assert all(switches.is_on(path) for path in FastPath)
    switches.turn_off([FastPath.LANES])
    with switches.without(FastPath.RUN_AHEAD):
        assert not switches.is_on(FastPath.LANES)
        assert not switches.is_on(FastPath.RUN_AHEAD)

    assert [path for path in FastPath if not switches.is_on(path)] == [FastPath.LANES]


@pytest.mark.skipif(not runs_cpu() or sys.platform != "linux", reason="powers are a Linux CPU's")
def test_exponentials() -> None:
    """They are MLX's own then."""
    assert by_powers()
    with SWITCHES.without(FastPath.EXPONENTIALS):
        assert not by_powers()


def test_lanes() -> None:
    """The whole is one part then."""
    wide = {"count": 8, "values": 8 * LANE_VALUES_MIN, "axis": 0}
    parts: list[slice] = []

    def work(part: slice) -> mx.array:
        parts.append(part)
        return mx.arange(part.start, part.stop)

    side_by_side(work, **wide)
    assert len(parts) == min(len(lanes()), 8)
    parts.clear()
    with SWITCHES.without(FastPath.LANES):
        side_by_side(work, **wide)
    assert parts == [slice(0, 8)]


@pytest.mark.parametrize(
    ("path", "way", "together"),
    [
        (FastPath.LANES, Way(Lead.MADE_UP, joins=True, guesses=True), True),
        (FastPath.RUN_AHEAD, Way(None, joins=True, guesses=True), True),
        (FastPath.JOINED_PASSES, Way(Lead.MADE_UP, joins=False, guesses=True), True),
        (FastPath.PROMPTS_TOGETHER, Way(Lead.MADE_UP, joins=True, guesses=True), False),
    ],
)
def test_steps(path: FastPath, way: Way, *, together: bool) -> None:
    """A model is stepped without what is off."""
    with SWITCHES.without(path):
        assert way_of(DENSE, caches()) == way
        assert reads_together(DENSE, caches()) is together


def test_compiled_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They are an affair of CUDA, and of nobody where they are off."""
    model = load(write_model(tmp_path_factory.mktemp("m"), config_with()))
    rows = RowCaches(model.new_caches(), context_max=64, rows_max=2)

    assert compile_steps(model, rows, DeviceKind.CPU) is None
    assert compile_steps(model, rows, DeviceKind.CUDA) is not None
    with SWITCHES.without(FastPath.COMPILED_STEP):
        assert compile_steps(model, rows, DeviceKind.CUDA) is None


def test_followers_hear_of_every_change() -> None:
    """A path that is taken outside Python is switched with the others, back too."""
    switches = Switches()
    heard: list[bool] = []
    switches.follow(lambda: heard.append(switches.is_on(FastPath.FEW_ROWS)))
    with switches.without(FastPath.FEW_ROWS):
        assert heard == [True, False]
    switches.turn_off([FastPath.FEW_ROWS])

    assert heard == [True, False, True, False]
