"""A part of a stored tensor, read straight to where it ends: cut along any axis, in any pieces."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.safetensors_header import TensorFact, read_header
from mlxd_models.fit.parts import Part
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.weights import direct_reading
from mlxd_worker.models.weights.direct_reading import Segment, read_joined

SHAPE = (3, 12, 1000)
PART = Part(2, range(250, 500))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[TensorFact, mx.array]:
    """A tensor in a file behind another one, and its values."""
    file = tmp_path / "model.safetensors"
    values = mx.random.normal(SHAPE, mx.bfloat16, key=mx.random.key(5))
    mx.save_safetensors(str(file), {"a": mx.ones(7), "b": values})
    (fact,) = [fact for fact in read_header(file) if fact.name == "b"]
    return fact, values


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    "stripe_nbytes", [0, 1 << 16], ids=["by themselves", "with what is between"]
)
@pytest.mark.parametrize("pieces", [4096, 1 << 20])
def test_any_part_is_read(
    stored: tuple[TensorFact, mx.array],
    dtype: str,
    stripe_nbytes: int,
    pieces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is stored or widened; of all places along the first axis, or of one."""
    fact, values = stored
    for name in ("PIECE_NBYTES_MIN", "PIECE_NBYTES_MAX", "SCRATCH_NBYTES"):
        monkeypatch.setattr(direct_reading, name, pieces)
    monkeypatch.setattr(direct_reading, "STRIPE_NBYTES", stripe_nbytes)
    monkeypatch.setattr(direct_reading, "STRIPES_AT_ONCE", 5)
    parts = [Part(0, range(1, 2)), Part(1, range(3, 6)), PART, Part(2, range(1000))]
    for part in parts:
        expected = mx.take(values, mx.array(list(part.span)), axis=part.axis)
        array = read_joined([Segment(fact, None, part)], part.of(SHAPE), dtype=dtype)
        assert mx.array_equal(array, expected.astype(array.dtype))
        if part.axis == 0:
            continue
        array = read_joined(
            [Segment(fact, place, part) for place in (2, 0)], (2, *part.of(SHAPE)[1:]), dtype=dtype
        )
        assert mx.array_equal(array, expected[mx.array([2, 0])].astype(array.dtype))


def test_a_file_that_ends_within_a_stripe_is_refused(stored: tuple[TensorFact, mx.array]) -> None:
    """Also where stripes are read together: the last one is missed."""
    fact, _ = stored
    last = fact.begin + fact.nbytes - 2 * (SHAPE[2] - PART.span.stop)
    with fact.file.open("r+b") as file:
        file.truncate(last)
    read_joined([Segment(fact, None, PART)], PART.of(SHAPE), dtype="BF16")
    with fact.file.open("r+b") as file:
        file.truncate(last - 1)
    with pytest.raises(InvalidModel, match="ends before it does"):
        read_joined([Segment(fact, None, PART)], PART.of(SHAPE), dtype="BF16")
