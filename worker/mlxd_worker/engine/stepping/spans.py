"""Images whose places see each other, both ways: what a pass must have together. Pure.

Invariants:
- No chunk ends within such an image. One may begin there, where former passes left the row: what
  stands before it was computed with all of the image at hand.
- A token sees no further than the end of its image, and of its chunk; a text's token, itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxd_worker.engine.request import Image

Chunk = tuple[Sequence[Image], int, int]
"""A row's images, the position of its next token, and how many tokens are read."""


def count_whole(images: Sequence[Image], first: int, count: int) -> int:
    """Return how many tokens from position `first` on may be read at once, at best `count`.

    Fewer where these would cut an image; more, where the first of them is within one and they do
    not reach its end.
    """
    end = first + count
    for image in images:
        if image.whole and image.start < end < image.stop:
            end = image.start if image.start > first else image.stop
    return end - first


def lasts_of(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Return the last position that each token of a pass sees, as `Batch.lasts`."""
    if not any(_shows(*chunk) for chunk in chunks):
        return ()
    lasts: list[int] = []
    for images, first, count in chunks:
        own = list(range(first, first + count))
        for image in images:
            begin, end = max(image.start, first), min(image.stop, first + count)
            if image.whole and begin < end:
                assert end == image.stop, "a chunk never ends within it"
                own[begin - first : end - first] = [end - 1] * (end - begin)
        lasts += own
    return tuple(lasts)


def _shows(images: Sequence[Image], first: int, count: int) -> bool:
    """Tell whether such an image is among the tokens."""
    return any(
        image.whole and image.start < first + count and image.stop > first for image in images
    )
