"""What the bench of the gateway asks over gRPC and over HTTP."""

from __future__ import annotations

import random
from pathlib import Path

from tests.bench.cases import make_closed
from tests.bench.gateway import draw_run
from tests.bench.prompts import Prompts
from tests.bench.sides import Side

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
WAYS = (Side("grpc", "127.0.0.1:1", "bench"), Side("http", "127.0.0.1:2", "bench"))


def test_no_way_finds_what_the_other_has_left_behind() -> None:
    """One worker serves both: the same prompts would be kept prefixes for whichever is second."""
    run = draw_run(WAYS, make_closed(4, 24, 8), Prompts(DEMO, seed=1), random.Random(1))

    assert [way for way, _ in run] == list(WAYS)
    first, second = ({request.text for request in requests} for _, requests in run)
    assert len(first) == len(second) == 4
    assert not first & second
