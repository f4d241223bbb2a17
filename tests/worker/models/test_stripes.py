"""A part of a stored tensor, read straight to where it ends: cut along any axis, in any pieces."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.safetensors_header import TensorFact, read_header
from mlxd_models.fit.parts import Part
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.weights.direct_reading import (
    PIECE_NBYTES_MAX,
    PIECE_NBYTES_MIN,
    STRIPE_NBYTES,
    STRIPES_AT_ONCE,
    Segment,
    read_joined,
)

SHAPE = (3, 700, 1000)
PARTS = {
    "places": Part(0, range(1, 3)),
    "long stripes": Part(1, range(300, 400)),
    "short stripes": Part(2, range(250, 500)),
    "all": Part(2, range(1000)),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[TensorFact, mx.array]:
    """A tensor in a file behind another one, and its values."""
    file = tmp_path_factory.mktemp("stripes") / "model.safetensors"
    values = mx.random.normal(SHAPE, mx.bfloat16, key=mx.random.key(5))
    mx.save_safetensors(str(file), {"a": mx.ones(7), "b": values})
    (fact,) = [fact for fact in read_header(file) if fact.name == "b"]
    return fact, values


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_any_part_is_read(stored: tuple[TensorFact, mx.array], part: Part, dtype: str) -> None:
    """As it is stored or widened; of all places along the first axis, or of some."""
    fact, values = stored
    expected = mx.take(values, mx.array(list(part.span)), axis=part.axis)
    array = read_joined([Segment(fact, None, part)], part.of(SHAPE), dtype=dtype)
    assert mx.array_equal(array, expected.astype(array.dtype))
    if part.axis == 0:
        return
    some = [Segment(fact, place, part) for place in (2, 0)]
    array = read_joined(some, (2, *part.of(SHAPE)[1:]), dtype=dtype)
    assert mx.array_equal(array, expected[mx.array([2, 0])].astype(array.dtype))


def test_parts_are_read_by_themselves_where_that_pays(
    stored: tuple[TensorFact, mx.array],
) -> None:
    """Nothing between long stripes is read; short ones are read many at once, and in pieces."""
    fact, _ = stored
    segments = {name: Segment(fact, None, part) for name, part in PARTS.items()}
    whole = [segment.stripes for segment in segments.values()]
    for segment, stripes in zip(segments.values(), whole, strict=True):
        assert sum(each.total_nbytes for each in stripes.cut(4096)) == segment.nbytes
    long, short = segments["long stripes"].stripes, segments["short stripes"].stripes
    assert long.nbytes >= STRIPE_NBYTES > short.nbytes
    assert all(each.count == 1 for each in long.cut(PIECE_NBYTES_MAX))
    pieces = list(short.cut(PIECE_NBYTES_MIN))
    assert len(pieces) > 1
    assert pieces[0].count > STRIPES_AT_ONCE
    assert all((each.count - 1) * each.step < PIECE_NBYTES_MIN for each in pieces)


def test_a_file_that_ends_within_a_stripe_is_refused(tmp_path: Path) -> None:
    """Also where stripes are read together: the last one is missed."""
    file, part = tmp_path / "model.safetensors", PARTS["short stripes"]
    mx.save_safetensors(str(file), {"b": mx.ones(SHAPE, mx.bfloat16)})
    (fact,) = read_header(file)
    last = fact.begin + fact.nbytes - 2 * (SHAPE[2] - part.span.stop)
    with file.open("r+b") as stream:
        stream.truncate(last)
    read_joined([Segment(fact, None, part)], part.of(SHAPE), dtype="BF16")
    with file.open("r+b") as stream:
        stream.truncate(last - 1)
    with pytest.raises(InvalidModel, match="ends before it does"):
        read_joined([Segment(fact, None, part)], part.of(SHAPE), dtype="BF16")
