"""Prompts with images, and how a model reads them: in pieces, beside others, together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np

from mlxd_models.files.image_settings import ImageSettings, read_image_settings
from mlxd_shared.config import IMAGE_PLACES_MAX
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.axes import turns_of
from mlxd_worker.engine.request import Image
from mlxd_worker.engine.stepping.spans import count_whole, lasts_of
from mlxd_worker.models.base import Batch, Inlay, Model, Passes, Sighted
from tests.support.mlx_memory import live_nbytes
from tests.worker.tiny import caches_of

ROW: Final = RowId(1)


class SeenCase(Protocol):
    """A model's configuration, and a prompt that shows it images."""

    @property
    def side(self) -> int:
        """Of an image, or of a place of images that keep their shape, in pixels."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Text with images between."""

    @property
    def images(self) -> tuple[Image, ...]:
        """The images at their places."""

    def pixels(self) -> Iterable[np.ndarray[Any, Any]]:
        """Return at least as many images, uint8 [height, width, 3]."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt, and what a model sees of its images."""

    prompt: tuple[int, ...]
    images: tuple[Image, ...] = ()
    features: tuple[mx.array, ...] = ()
    spans: tuple[Image, ...] | None = None
    """What sees itself both ways; None: those of its images that no pass cuts."""

    @property
    def shift(self) -> int:
        """By how much what follows stands elsewhere than at its position."""
        return sum(image.shift for image in self.images)

    @property
    def seeing_both_ways(self) -> tuple[Image, ...]:
        """What sees itself both ways."""
        return self.images if self.spans is None else self.spans

    def inlays(self, begin: int, count: int, *, first: int = 0) -> tuple[Inlay, ...]:
        """Return what stands for tokens, of which the first one is a pass's `first`."""
        inlays = []
        for image, seen in zip(self.images, self.features, strict=True):
            start, stop = max(image.start, begin), min(image.stop, begin + count)
            if start < stop:
                own = seen[start - image.start : stop - image.start]
                inlays.append(Inlay(first + start - begin, own))
        return tuple(inlays)


def shown_by(model: Model, folder: Path, case: SeenCase) -> Shown:
    """Return a case's prompt with what the model sees of its images, one by one."""
    assert isinstance(model, Sighted)
    settings = read_image_settings(folder, side=case.side, places_max=IMAGE_PLACES_MAX)
    features = [model.see(mx.array(pixels)[None], settings)[0] for pixels in case.pixels()]
    return Shown(case.prompt, case.images, tuple(features))


def squares_shown_by(model: Model, folder: Path, case: SeenCase) -> Shown:
    """Return the same of images that are squares of one size, seen together."""
    assert isinstance(model, Sighted)
    settings = read_image_settings(folder, side=case.side)
    features = model.see(mx.array(np.stack(list(case.pixels()))), settings)
    return Shown(case.prompt, case.images, tuple(features)[: len(case.images)])


def see_blank(
    model: Model, settings: ImageSettings, shape: tuple[int, int, int]
) -> tuple[mx.array, int]:
    """Return the features of so many blank images, [count, height, width], and what they took.

    That is by how many bytes live arrays grew at most.
    """
    assert isinstance(model, Sighted)
    pixels = mx.zeros((*shape, 3), dtype=mx.uint8)
    mx.eval(pixels)
    held_nbytes = live_nbytes()
    features = model.see(pixels, settings)
    return features, mx.get_peak_memory() - held_nbytes


def read(
    model: Passes,
    caches: RowCaches,
    shown: Shown,
    widths: Sequence[int],
    row: RowId = ROW,
    *,
    placed: bool = True,
) -> mx.array:
    """Return the logits of a prompt, read in pieces of about these widths by turns.

    A piece cuts no image that none may cut. placed: whether tokens stand where images have them.
    """
    caches.join(row, tokens=len(shown.prompt))
    parts: list[mx.array] = []
    begin = 0
    while begin < len(shown.prompt):
        width = min(widths[len(parts) % len(widths)], len(shown.prompt) - begin)
        count = count_whole(shown.images, begin, width)
        batch = replace(
            Batch.prefill(shown.prompt[begin : begin + count], begin, row),
            inlays=shown.inlays(begin, count),
            turns=turns_of([(shown.images, begin, count)]) if placed else None,
            lasts=lasts_of([(shown.seeing_both_ways, begin, count)]),
        )
        parts.append(model.logits(model.forward(batch, caches)))
        mx.eval(parts[-1], caches.state())
        begin += count
    return mx.concatenate(parts, axis=0)


def logits_in_pieces(
    model: Model, caches: RowCaches, shown: Shown, widths: Sequence[int]
) -> mx.array:
    """Return the logits of a prompt, of which nothing stays."""
    logits = read(model, caches, shown, widths)
    caches.leave(ROW)
    return logits


def read_whole(model: Model, shown: Shown) -> mx.array:
    """Return the logits of a prompt that is read in one pass, into caches of its own."""
    return read(model, caches_of(model), shown, [len(shown.prompt)])


def decode_together(
    model: Model, prompts: Sequence[Shown], more: Sequence[int], *, width: int
) -> list[mx.array]:
    """Return the logits of tokens behind each prompt [len(more), vocab], decoded in one batch.

    width: of the pieces in which prompts are read.
    """
    caches = caches_of(model)
    rows = [RowId(10 + index) for index in range(len(prompts))]
    for row, shown in zip(rows, prompts, strict=True):
        read(model, caches, shown, [width], row)
    steps = []
    for at, token in enumerate(more):
        offsets = [len(shown.prompt) + at for shown in prompts]
        caches.reserve_all({row: offset + 1 for row, offset in zip(rows, offsets, strict=True)})
        shifts = [shown.shift for shown in prompts]
        batch = Batch.decode([token] * len(rows), offsets, rows, shifts=shifts)
        steps.append(model.logits(model.forward(batch, caches)))
        mx.eval(steps[-1], caches.state())
    return [mx.stack([step[index] for step in steps]) for index in range(len(rows))]


def read_together(model: Model, prompts: Sequence[Shown]) -> list[mx.array]:
    """Return each prompt's logits, all of them read in one pass."""
    caches = caches_of(model)
    rows = [RowId(20 + index) for index in range(len(prompts))]
    parts: list[tuple[Sequence[int], int, RowId]] = []
    inlays: list[Inlay] = []
    ends = [0]
    for row, shown in zip(rows, prompts, strict=True):
        caches.join(row, tokens=len(shown.prompt))
        parts.append((shown.prompt, 0, row))
        inlays += shown.inlays(0, len(shown.prompt), first=ends[-1])
        ends.append(ends[-1] + len(shown.prompt))
    batch = replace(
        Batch.chunks(parts),
        inlays=tuple(inlays),
        turns=turns_of([(shown.images, 0, len(shown.prompt)) for shown in prompts]),
        lasts=lasts_of([(shown.seeing_both_ways, 0, len(shown.prompt)) for shown in prompts]),
    )
    logits = model.logits(model.forward(batch, caches))
    mx.eval(logits, caches.state())
    return [logits[begin:end] for begin, end in itertools.pairwise(ends)]
