"""Small models of every kind of memory; `python -m tests.bench.outliving_models FOLDER NAME...`.

For a caller that must not import MLX itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tests.support.random_model import (
    DEMO,
    write_dense_model,
    write_hybrid_model,
    write_latent_model,
    write_sliding_model,
)

SHAPE = replace(DEMO, context=1024)
WINDOW = 64

WRITERS: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "standard": lambda folder: write_dense_model(folder, shape=SHAPE),
        "q8": lambda folder: write_dense_model(folder, shape=SHAPE, seed=2),
        "q4": lambda folder: write_dense_model(folder, shape=SHAPE, seed=3),
        "sliding": lambda folder: write_sliding_model(
            folder, window=WINDOW, mixed=False, shape=SHAPE
        ),
        "mixed": lambda folder: write_sliding_model(folder, window=WINDOW, mixed=True, shape=SHAPE),
        "hybrid": lambda folder: write_hybrid_model(folder, shape=SHAPE),
        "latent": lambda folder: write_latent_model(folder, shape=SHAPE),
    }
)


def main() -> None:
    """Write those that are named, each into a folder of its name; others are somebody else's."""
    folder, *names = sys.argv[1:]
    for name in names:
        if name in WRITERS:
            WRITERS[name](Path(folder) / name)


if __name__ == "__main__":
    main()
