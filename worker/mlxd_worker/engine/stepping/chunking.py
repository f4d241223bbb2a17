"""What the chunks of prompts may be read with, and how much of a prompt is a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.cache.layers.attention import CAUSAL_WARMED, unmasked_count
from mlxd_worker.cache.layers.kv import copies_all
from mlxd_worker.cache.layers.tokens import is_read_in_place
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Image
from mlxd_worker.engine.row import Row
from mlxd_worker.engine.stepping.forward import RowChunk
from mlxd_worker.engine.stepping.spans import count_whole
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.models.base import Capabilities


def reads_together(able: Capabilities, caches: RowCaches) -> bool:
    """Tell whether one pass may read several rows' prompts.

    Windows and states are read row by row: what goes around in a ring, and what every token
    changes, has an order within each row that a list of many rows' tokens has not.
    """
    return able.reads_chunks and caches.sliceable and SWITCHES.is_on(FastPath.PROMPTS_TOGETHER)


def is_alone(row: Row) -> bool:
    """Tell whether something is made of a row's own passes, or goes into them, beside tokens."""
    looks = any(image.stop > row.offset for image in row.request.images)
    return row.embeds or row.scores is not None or looks


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a model and its caches read chunks."""

    in_place: int
    """Tokens that a pass in place may have (`Capabilities.prompts_in_place`)."""
    copies: bool
    """Whether all layers copy what a longer chunk reads, by kernels for arenas that are written in
    place, and need no mask at some positions."""

    @classmethod
    def of(cls, able: Capabilities, caches: RowCaches) -> Chunking:
        """Return how this model's chunks are read from these caches."""
        return cls(able.prompts_in_place, caches.in_place and copies_all(caches.layers))

    def reads_in_place(self, company: Sequence[RowChunk]) -> bool:
        """Tell whether a pass writes in place, and nothing but its own row's next pass reads it."""
        if not self.in_place or any(is_alone(row) for row, _ in company):
            return False
        ends = [row.offset + len(tokens) for row, tokens in company]
        return is_read_in_place(ends, [len(tokens) for _, tokens in company], most=self.in_place)

    def fit(
        self, images: Sequence[Image], offset: int, tokens: int, *, wanted: int, capacity: int
    ) -> int:
        """Return how many of a row's `tokens` from `offset` on are one chunk: all of an image.

        Where layers can do without a mask, one that is too long for a pass in place begins and ends
        where none is needed: with it the same takes up to a third longer on an H200 (decision
        0112). Not of a prompt that ends beyond `CAUSAL_WARMED`, where each such place is met first
        by somebody.

        wanted: how many the row's prompt has left. capacity: of the row's place.
        """
        if any(image.whole for image in images):
            return count_whole(images, offset, tokens)
        if not self.copies or offset + wanted > CAUSAL_WARMED:
            return tokens
        if is_read_in_place([offset + tokens], [tokens], most=self.in_place):
            return tokens
        return unmasked_count(offset, tokens, wanted=wanted, capacity=capacity)
