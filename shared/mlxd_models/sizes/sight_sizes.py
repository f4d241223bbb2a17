"""What seeing takes besides a tower's weights, from its widths alone. Pure.

Invariants:
- Every image is of one size when a model sees it, and takes as many places in a prompt as any.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_shared import config


@dataclass(frozen=True, slots=True)
class SightSizes:
    """How a model sees, as far as others than its tower need to know."""

    token_id: int
    """The token that stands for an image, as the model's template writes it."""
    tokens: int
    """How many places in a prompt an image takes."""
    side: int
    """Width and height of an image as the model sees it, in pixels."""
    hidden: int
    """Values of a feature: what the decoder's embeddings have."""
    pass_values: int
    """Values alive at most while one image is seen."""

    @property
    def pixels_nbytes(self) -> int:
        """What an image takes before it is seen: 8 bits for each of three colours."""
        return 3 * self.side * self.side

    def seeing_nbytes(self, item_nbytes: int) -> int:
        """Return what a pass over as many images as are seen at once takes."""
        return config.IMAGES_TOGETHER_MAX * self.pass_values * item_nbytes

    def kept_nbytes(self, item_nbytes: int) -> int:
        """Return what the features of images take that are kept."""
        return config.IMAGE_FEATURES_KEPT_MAX * self.tokens * self.hidden * item_nbytes
