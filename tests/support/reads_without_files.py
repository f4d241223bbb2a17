"""A process of its own that reads weights while it may open no file, and again when it may.

`python -m tests.support.reads_without_files FILE`: prints, as JSON, what each way of reading said
the first time, and the sum of what it read the second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mlxd_models.files.weights import read_header
from mlxd_shared.domain.errors import MlxdError
from mlxd_worker.models.weights.direct_reading import Segment, read_joined
from mlxd_worker.models.weights.lazy_tensors import LazyTensors
from tests.support.no_more_files import no_more_files


def main() -> None:
    """Read the file's first tensor in every way."""
    facts = list(read_header(Path(sys.argv[1])))
    (fact, *_) = facts
    known = LazyTensors(facts)

    def direct() -> mx.array:
        return read_joined([Segment(fact)], fact.shape, dtype="F32")

    ways: dict[str, Callable[[], mx.array]] = {
        "pop": lambda: LazyTensors(facts).pop(fact.name),
        "reopened": lambda: known.reopen(fact.name),
        "direct": direct,
    }
    mx.eval(mx.ones(4) + 1, direct())  # threads and their descriptors are there before
    with no_more_files():
        said = {name: _error_of_read(read) for name, read in ways.items()}
    sums = {name: read().astype(mx.float32).sum().item() for name, read in ways.items()}
    sys.stdout.write(json.dumps({name: [*said[name], sums[name]] for name in ways}))


def _error_of_read(read: Callable[[], mx.array]) -> list[str]:
    try:
        mx.eval(read())
    except MlxdError as error:
        return [type(error).__name__, error.describe()]
    return ["", ""]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # one in 90 ends by MLX's threads otherwise, which are there still at the exit
