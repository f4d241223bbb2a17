"""What seeing takes besides a tower's weights, from its widths alone. Pure.

Invariants:
- Every image is of one size when a model sees it, and takes as many places in a prompt as any; or
  sizes vary (`varies`), and it takes one for each square of `side` pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mlxd_shared import config

READER_NBYTES: Final = 23 * config.MIB
"""A process that decodes images, before it has read one: interpreter and Pillow. Measured: 23.5 MB,
and with images of 3.2 million pixels 58.7 (JPEG) to 67.1 (PNG)."""
PICTURE_PIXELS: Final = 2 * config.MIB
"""Of a usual picture before it is made smaller, where a model sees fewer pixels than that."""
_FLOAT_NBYTES: Final = 4
_DECODED, _SHOWN = 6, 8
"""Bytes a pixel there: of what is decoded, four and what its decoder holds; of what is seen, four
and the answer that is made of it."""


@dataclass(frozen=True, slots=True)
class SightSizes:
    """How a model sees, as far as others than its tower need to know."""

    token_id: int
    """The token that stands for an image, as the model's template writes it."""
    tokens: int
    """How many places in a prompt an image takes; the most where sizes vary."""
    side: int
    """Width and height of an image as the model sees it, in pixels; what both are multiples of
    where sizes vary."""
    hidden: int
    """Values of a feature that take an embedding's place."""
    pass_values: int
    """Values alive at most while one image is seen."""
    settled_values: int = 0
    """The same on a CPU, where a tower evaluates each of its parts before the next; 0: as many."""
    float_values: int = 0
    """How many of those are float32, of whatever type the weights are."""
    varies: bool = False
    """Whether an image keeps its shape: it has then rows and columns of places."""
    levels: int = 0
    """How many of the decoder's first layers are given more of each place: a feature has so many
    times `hidden` values behind the first ones."""
    whole: bool = False
    """Whether an image's places see each other, both ways: no pass has some of them alone."""
    marks: tuple[int, int] | None = None
    """The tokens before and behind an image's places where a template writes the first one alone,
    for all of it; None: it writes `token_id`."""

    @property
    def around(self) -> tuple[int, int, int] | None:
        """The tokens of an image with its marks, one for all places; None: it has no marks."""
        if self.marks is None:
            return None
        before, behind = self.marks
        return before, self.token_id, behind

    @property
    def pixels_nbytes(self) -> int:
        """What an image takes at most before it is seen: 8 bits for each of three colours."""
        return self.nbytes_of(self.tokens)

    @property
    def places_max(self) -> int | None:
        """How many places an image takes at most where sizes vary; None: they do not."""
        return self.tokens if self.varies else None

    @property
    def tokens_each(self) -> int | None:
        """How many places every image takes; None: sizes vary."""
        return None if self.varies else self.tokens

    @property
    def tokens_least(self) -> int:
        """How many places an image takes at least."""
        return 1 if self.varies else self.tokens

    @property
    def together(self) -> int:
        """How many images are seen in one pass."""
        return 1 if self.varies else config.IMAGES_TOGETHER_MAX

    def together_on(self, *, on_cpu: bool) -> int:
        """Return the same by the device: one is enough work for a CPU."""
        return 1 if on_cpu else self.together

    def nbytes_of(self, tokens: int) -> int:
        """Return what an image of so many places takes before it is seen."""
        return 3 * self.side * self.side * (tokens if self.varies else 1)

    def seeing_nbytes(self, item_nbytes: int, *, on_cpu: bool = False) -> int:
        """Return what a pass over as many images as are seen at once takes."""
        nbytes = self.pass_values * item_nbytes
        if on_cpu and self.settled_values:
            wider = max(_FLOAT_NBYTES - item_nbytes, 0)
            nbytes = self.settled_values * item_nbytes + self.float_values * wider
        return self.together_on(on_cpu=on_cpu) * nbytes

    def reading_nbytes(self, rows: int) -> int:
        """Return what reading files takes beside the arrays, for so many streams at once.

        The decoding processes with a usual picture, or with the largest that the model sees; and
        one image's pixels for each stream. A larger picture takes its decoder more for a moment, up
        to `config.IMAGE_READ_BYTES_MAX`.
        """
        seen = self.pixels_nbytes // 3
        reader = READER_NBYTES + _DECODED * max(seen, PICTURE_PIXELS) + _SHOWN * seen
        held = min(rows * self.pixels_nbytes, config.IMAGE_PIXELS_HELD_BYTES_MAX)
        return min(rows, config.IMAGE_READS_MAX) * reader + held

    def kept_nbytes(self, item_nbytes: int) -> int:
        """Return what the features of images take that are kept."""
        feature = (1 + self.levels) * self.hidden
        return config.IMAGE_FEATURES_KEPT_MAX * self.tokens * feature * item_nbytes
