"""What seeing is said to take: of the arrays, and of the processes that read pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxd_models.fit.plan import Plan
from mlxd_models.fit.planner import plan_load
from mlxd_models.sizes.sight_sizes import PICTURE_PIXELS, READER_NBYTES, SightSizes
from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec
from tests.support.model_facts import device, facts

SQUARES = SightSizes(token_id=5, tokens=576, side=336, hidden=4, pass_values=1 << 20)
SHAPES = replace(SQUARES, tokens=config.IMAGE_PLACES_MAX, side=28, varies=True)
CPU = device(1 << 20)


def plan(sight: SightSizes | None, *, kind: DeviceKind = DeviceKind.CPU, rows: int = 1) -> Plan:
    """Return the plan of a model that sees so."""
    return plan_load(replace(facts(10), sight=sight), LoadSpec(rows_max=rows),
                     replace(CPU, kind=kind))  # fmt: skip


def term(of: Plan, name: str) -> int:
    """Return a term's bytes."""
    return next(each.nbytes for each in of.terms if each.name == name)


@pytest.mark.parametrize(("sight", "seen"), [(SQUARES, 336 * 336), (SHAPES, 4096 * 784)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_readers_and_pixels_count_with_the_process(sight: SightSizes, seen: int, rows: int) -> None:
    """A decoder for each request that is read at once, around the larger of a usual picture and
    what is seen; an image's pixels for each stream. A GPU has neither."""
    blind = term(plan(None, rows=rows), "process")
    reader = READER_NBYTES + 6 * max(seen, PICTURE_PIXELS) + 8 * seen
    beyond = term(plan(sight, rows=rows), "process") - blind
    assert beyond == min(rows, config.IMAGE_READS_MAX) * reader + rows * 3 * seen
    gpu = plan(sight, kind=DeviceKind.CUDA, rows=rows)
    assert term(gpu, "process") == term(plan(None, kind=DeviceKind.CUDA, rows=rows), "process")


def test_pixels_count_no_further_than_they_are_held() -> None:
    """However many streams there may be."""
    most = config.IMAGE_PIXELS_HELD_BYTES_MAX
    readers = config.IMAGE_READS_MAX * (READER_NBYTES + 14 * 4096 * 784)
    assert SHAPES.reading_nbytes(10_000) == readers + most


def test_a_cpu_sees_one_image_and_one_part_after_another() -> None:
    """A plan for it counts that much; elsewhere several images, each whole part at once."""
    settled = replace(SQUARES, settled_values=1 << 19)
    kept = settled.kept_nbytes(4)
    beyond = {
        kind: term(plan(settled, kind=kind), "activations") - kept
        for kind in (DeviceKind.CPU, DeviceKind.CUDA)
    }
    assert settled.seeing_nbytes(4, on_cpu=True) == 4 << 19
    assert SQUARES.seeing_nbytes(4, on_cpu=True) == 4 << 20
    assert beyond[DeviceKind.CUDA] == config.IMAGES_TOGETHER_MAX * (4 << 20)
    assert beyond[DeviceKind.CPU] < beyond[DeviceKind.CUDA]
