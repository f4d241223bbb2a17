"""The models that chats are held with: everything remembered, windows, and recurrent layers.

Run by its name, `python -m tests.support.chat_models FOLDER ARCHITECTURE WIDTH`, it writes one of
them for a caller that must not import MLX itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from tests.bench.models import Shape
from tests.support.random_model import (
    DEMO,
    LARGE,
    write_dense_model,
    write_hybrid_model,
    write_sliding_model,
)

WINDOW = 512
WIDTHS = MappingProxyType({"demo": DEMO, "100MB": LARGE})


ARCHITECTURES: MappingProxyType[str, Callable[[Path, Shape], Path]] = MappingProxyType(
    {
        "llama": lambda folder, shape: write_dense_model(folder, shape=shape),
        "sliding": lambda folder, shape: write_sliding_model(
            folder, window=WINDOW, mixed=True, shape=shape
        ),
        "hybrid": lambda folder, shape: write_hybrid_model(folder, shape=shape),
    }
)


def main() -> None:
    """Write one."""
    folder, architecture, width = sys.argv[1:]
    ARCHITECTURES[architecture](Path(folder), WIDTHS[width])


if __name__ == "__main__":
    main()
