"""Where tokens stand for rotations in prompts whose images keep their shape (M-RoPE). Pure.

A token of text stands one further than what is before it on three axes at once: time, height and
width. An image's places share one time, and each stands at its own row and column from there; what
follows stands behind the longer of both (Qwen2-VL, Wang et al., 2024).

Invariants:
- All of it follows from a request's images and a token's position: nothing is kept with caches,
  prefixes or blocks on disk. What is found of former prompts is the same tokens from the first one
  on, so it was rotated by the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxd_worker.engine.request import Image

Chunk = tuple[Sequence[Image], int, int]
"""A row's images, the position of its next token, and how many tokens are read."""
Axes = tuple[list[int], list[int], list[int]]
"""Times, heights and widths, a number a token."""


def shift_before(images: Sequence[Image], position: int) -> int:
    """Return by how much a text's token at `position` stands elsewhere, by the images before it."""
    return sum(image.shift for image in images if image.stop <= position)


def axes_of(images: Sequence[Image], first: int, count: int) -> Axes:
    """Return where `count` tokens from position `first` on stand."""
    times: list[int] = []
    heights: list[int] = []
    widths: list[int] = []
    place, stop, shift = first, first + count, shift_before(images, first)
    for image in images:
        if image.grid is None or image.stop <= first or image.start >= stop:
            continue
        text = range(place + shift, image.start + shift)
        start, columns = image.start + shift, image.grid[1]
        end = min(image.stop, stop)
        inside = range(max(place - image.start, 0), end - image.start)
        times += [*text, *[start] * len(inside)]
        heights += [*text, *(start + at // columns for at in inside)]
        widths += [*text, *(start + at % columns for at in inside)]
        place, shift = end, shift + image.shift
    rest = range(place + shift, stop + shift)
    return [*times, *rest], [*heights, *rest], [*widths, *rest]


def turns_of(chunks: Sequence[Chunk]) -> mx.array | None:
    """Return where a pass's tokens stand, as `Batch.turns`; None where that is at their positions.

    One chunk is a row of so many tokens; several lie one after another, each token a row.
    """
    if not any(image.grid is not None for images, _, _ in chunks for image in images):
        return None
    is_one = len(chunks) == 1
    if any(_shows(*chunk) for chunk in chunks):
        each = [axes_of(*chunk) for chunk in chunks]
        joined = [[place for axes in each for place in axes[axis]] for axis in range(3)]
        turns = mx.array(joined, dtype=mx.int32)
        return turns[:, None] if is_one else turns[:, :, None]
    shifts = [shift_before(images, first) for images, first, _ in chunks]
    if not any(shifts):
        return None
    firsts = [first + shift for (_, first, _), shift in zip(chunks, shifts, strict=True)]
    counts = [1 if is_one else count for _, _, count in chunks]
    places = [
        first + at for first, count in zip(firsts, counts, strict=True) for at in range(count)
    ]
    return mx.array(places, dtype=mx.int32)


def _shows(images: Sequence[Image], first: int, count: int) -> bool:
    """Tell whether a place of an image that keeps its shape is among the tokens."""
    return any(
        image.grid is not None and image.start < first + count and image.stop > first
        for image in images
    )
