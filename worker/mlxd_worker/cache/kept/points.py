"""At which lengths the state of layers that cannot be cut is kept. Pure.

Keys and values can be cut at any token; a sliding window that has wrapped, or a recurrent state,
stands for one length only. What is not captured while it passes cannot be had again without
evaluating, so these rules decide how much of a prompt a later one has to evaluate anew.

Invariants:
- Points are ascending, each beyond `start` and at most the prompt's last evaluated token.
- A prompt has at most `PROMPT_POINTS_MAX` points: a capture may be 100 MB.
- Within the last 64 tokens of a prompt, wherever the next one departs from it, a point lies at most
  64 tokens before; further back the distance doubles. The same holds for what is being generated,
  of which the last two points are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

GRID_TOKENS = 64
"""Between points near the end of a prompt and while generating; absolute, so that prompts with
one beginning have points in common."""

COARSE_TOKENS = 8192
"""Between points of a very long prompt."""

PROMPT_POINTS_MAX = 16
"""Captures of one prompt."""

ROLLING_KEPT = 2
"""Captures of generated text that a row keeps while it runs."""


def prompt_points(
    start: int,
    end: int,
    *,
    branch: int | None = None,
    points_max: int = PROMPT_POINTS_MAX,
    block_tokens: int | None = None,
) -> tuple[int, ...]:
    """Return where to capture while a prompt is evaluated from `start` up to `end` tokens.

    `branch` is how far the prompt matched what is cached where that is beyond `start`: whoever
    shares as much next will find it. `block_tokens`: of the blocks that are kept on disk, where any
    are; then the end of the last one is a point. Where `points_max` cuts, the most useful ones
    stay: the end, the branch, that block's end, the grid's last two, then coarse ones, then the
    grid backwards.
    """
    grid = list(_backwards(start, end))
    coarse = range(_above(start, COARSE_TOKENS), end, COARSE_TOKENS)
    first = [end, *([] if branch is None else [branch])]
    if block_tokens is not None:
        first.append(end // block_tokens * block_tokens)
    wanted = [*first, *grid[:2], *reversed(coarse), *grid[2:]]
    within = dict.fromkeys(point for point in wanted if start < point <= end)
    return tuple(sorted(list(within)[:points_max]))


def next_rolling(offset: int) -> int:
    """Return the next length to capture at while a row that holds `offset` tokens generates."""
    return _above(offset, GRID_TOKENS)


def _above(offset: int, step: int) -> int:
    return (offset // step + 1) * step


def _backwards(start: int, end: int) -> Iterable[int]:
    """Yield grid points below `end`, nearest first, at distances that double."""
    point, distance = (end - 1) // GRID_TOKENS * GRID_TOKENS, GRID_TOKENS
    while point > start:
        yield point
        point, distance = point - distance, distance * 2
