"""Frames between ranks: what is sent arrives as it was, and nothing else is taken."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from mlxd_shared import config
from mlxd_shared.domain.requests import KVFormat, LoadSpec, Pooling, Sampling, Weights
from mlxd_worker.distributed.frames import (
    Deaf,
    Frame,
    FrameKind,
    Wire,
    WireBroken,
    load_of,
    pack_load,
    pack_submit,
    submit_of,
)
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.thread.facts import LoadJob


def test_a_stream_arrives_as_it_was() -> None:
    """Every field of a stream is on the wire, but its sink, which stays with the leader."""
    sampling = Sampling(0.7, 40, 0.9, 0.01, (1 << 64) - 1, ((5, -1.5),), 1.1, 0.1, 0.2, 32)
    sent = Submit(
        stream=StreamId(9),
        prompt=(1, 2, 3),
        sampling=sampling,
        max_tokens=None,
        submitted_s=1.25,
        sink=(sink := Deaf()),
        stop=("a", "\u00e9"),
        stop_token_ids=frozenset({4, 2}),
        eos_ids=frozenset({0}),
        pooling=Pooling.MEAN,
        shown={7: "x"},
        forced=(4, 5),
        deadline_s=0.1,
    )
    got = submit_of(Frame(FrameKind.SUBMIT, pack_submit(sent)), None)
    assert (got.sampling, dict(got.shown)) == (sampling, {7: "x"})
    names = [name for name in Submit.__slots__ if name != "sink"]
    assert [getattr(got, name) for name in names] == [getattr(sent, name) for name in names]
    assert got.sink is not sink


def test_a_load_arrives_as_it_was() -> None:
    """All options of a load are on the wire."""
    spec = LoadSpec(512, 4, Weights.BFLOAT16, kv_format=KVFormat.Q8, prefix_cache_nbytes=0)
    job = LoadJob(Path("/models/a"), "a", "d", spec)
    assert load_of(Frame(FrameKind.LOAD, pack_load(job))) == job


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">BI", FrameKind.STEP, config.RANK_FRAME_BYTES_MAX + 1),
        struct.pack(">BI", 99, 0),
        b"\x04",
    ],
)
def test_what_is_no_frame_breaks_the_wire(head: bytes) -> None:
    """A frame that is too long, unknown or cut off is refused before anything is read of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(head)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(WireBroken):
            Wire(ours).receive()


def test_a_frame_beyond_the_limit_is_not_sent() -> None:
    """Who sends keeps to the same limit, and says which."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(WireBroken, match=str(config.RANK_FRAME_BYTES_MAX)):
        Wire(ours).send(FrameKind.SUBMIT, bytes(config.RANK_FRAME_BYTES_MAX + 1))
