"""What attention over latents takes, from its widths alone. Pure.

Invariants:
- Both who plans a load and who carries it out reckon with these very sums.
"""

from __future__ import annotations


def latent_width(*, heads: int, rank: int, rotary: int) -> int:
    """Return the widest of what a layer makes of one position: as `PassSizes.projected` has it.

    Its queries become as wide as entries, `rank` and `rotary`, and read `rank` values each; they
    are there once more with their scale, and so is what they read, in order.
    """
    return heads * (rank + rotary)
