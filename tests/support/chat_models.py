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
    decoder_config,
    write_dense_model,
    write_random_model,
    write_sliding_model,
)

WINDOW = 512
WIDTHS = MappingProxyType({"demo": DEMO, "100MB": LARGE})


def write_hybrid_model(folder: Path, *, shape: Shape, seed: int = 1) -> Path:
    """Write a Qwen3.5: gated delta layers, and full attention in every third; return `folder`."""
    config = decoder_config(
        "Qwen3_5ForCausalLM",
        shape,
        full_attention_interval=3,
        linear_num_key_heads=shape.kv_heads,
        linear_num_value_heads=shape.heads,
        linear_key_head_dim=shape.hidden // shape.heads,
        linear_value_head_dim=shape.hidden // shape.heads,
        linear_conv_kernel_dim=4,
    )
    return write_random_model(folder, config, seed=seed)


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
