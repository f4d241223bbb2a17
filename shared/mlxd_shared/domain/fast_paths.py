"""The fast paths of a worker, each of which has a plain alternative.

Invariants:
- A path that is switched off changes no result but by rounding: what is slower then is all.
- The names are those of the file of findings, of status and of logs.
"""

from __future__ import annotations

from enum import StrEnum


class FastPath(StrEnum):
    """What can be switched off by itself."""

    COMPILED_STEP = "compiled-step"
    """A decode step as one compiled function, on CUDA."""
    DECODE_KERNEL = "decode-kernel"
    """One kernel that rotates, writes keys and values in place, and attends, on CUDA."""
    EXPONENTIALS = "exponentials"
    """Exponentials as powers of two, on a Linux CPU."""
    FEW_ROWS = "few-rows"
    """Products of few rows by kernels of mlxd's own, on a Linux CPU."""
    JOINED_PASSES = "joined-passes"
    """A decode step's pass that takes prompts' tokens along, on a CPU."""
    LANES = "lanes"
    """One operation's parts side by side on several cores, on a CPU."""
    PACKED_ROWS = "packed-rows"
    """Few rows' products with weights of 4 bits on tensor cores, on CUDA."""
    PROMPTS_TOGETHER = "prompts-together"
    """Several prompts in one pass."""
    ROW_KERNEL = "row-kernel"
    """A single row's products with what stands before and after them, on CUDA."""
    ROWS_KERNEL = "rows-kernel"
    """Several rows' products with small matrices, with what stands after them, on CUDA."""
    RUN_AHEAD = "run-ahead"
    """The next step is prepared, or runs, before the last one's tokens are known."""
