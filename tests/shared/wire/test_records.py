"""Dataclasses and messages of the same shape: what is absent, and what neither side may lack."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlxd.messages import Model
from mlxd.v1 import types_pb2
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.requests import LoadSpec, SamplingOptions, Weights
from mlxd_shared.wire.records import read, write

LATER = 99
"""A value that no enum has today."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A shape that no message has."""

    bytes_read: int
    colour: str


def test_a_field_that_the_wire_lacks_is_a_bug() -> None:
    """It is not left out in silence, in either direction."""
    with pytest.raises(StopIteration):
        read(Stray, types_pb2.LoadProgress())
    with pytest.raises(StopIteration):
        write(Stray(1, "red"), types_pb2.LoadProgress)


def test_what_says_nothing_stays_absent() -> None:
    """None does, and so does a message of nothing but absent fields; 0 is said."""
    assert write(LoadSpec(), types_pb2.LoadOptions) == types_pb2.LoadOptions()
    zero = LoadSpec(rows_max=0, keep_alive_s=0.0, sampling=SamplingOptions(top_k=0))
    pb = write(zero, types_pb2.LoadOptions)
    assert (pb.HasField("rows_max"), pb.HasField("keep_alive"), pb.HasField("sampling")) == (
        (True,) * 3
    )
    assert read(LoadSpec, pb) == zero


def test_what_a_later_version_says_is_unknown() -> None:
    """Not mistaken for any member of today; and a time that nobody told is none."""
    pb = types_pb2.Model(state=LATER, weights=LATER, kv_format=LATER)  # type: ignore[arg-type]
    model = read(Model, pb)
    assert (model.state, model.weights, model.kv_format) == (
        ModelState.UNKNOWN,
        Weights.AUTO,
        None,
    )
    assert (model.last_used_time, model.expire_time) == (None, None)
