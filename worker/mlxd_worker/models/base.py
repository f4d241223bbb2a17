"""What every architecture offers the engine: a forward pass over flat rows, and a head on demand.

Invariants:
- Everything but attention works on two-dimensional rows `[rows * width, hidden]`: a linear layer on
  `[rows, 1, hidden]` is treated as many products of one row and is several times slower.
- Positions are arrays (`Batch.offsets`); host integers (`Batch.lengths`) only choose shapes and
  guard bounds, so no compiled or cached graph depends on a position.
- All of it runs on the engine thread.
- A model states its capabilities when it is built; they never change afterwards, and nothing in
  them depends on rows or caches: whoever chooses how steps are run looks at both.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import mlx.core as mx

from mlxd_models.files.image_settings import ImageSettings
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import LayerCache, RowId
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.kernels.device import runs_cpu


@dataclass(frozen=True, slots=True)
class Inlay:
    """Rows in the places of tokens' embeddings, and what is added behind the first layers."""

    start: int
    """The place of the first, among all tokens of a pass."""
    rows: mx.array
    """[places, (1 + levels) * hidden]: side by side what takes an embedding's place, and what is
    added behind the first layer, behind the second, and so on."""

    def levels(self, hidden: int) -> int:
        """Return behind how many layers something is added, rows being of `hidden` values."""
        return self.rows.shape[1] // hidden - 1

    def level(self, number: int, hidden: int) -> mx.array:
        """Return [places, hidden]: level 0 takes an embedding's place; lazy."""
        return self.rows[:, number * hidden : (number + 1) * hidden]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass: N rows of `width` tokens each.

    Decode has N rows and width 1; a prefill chunk has one row and the chunk's width. Several rows'
    chunks (`counts`) lie one after another: N is then the number of tokens, width 1.
    """

    tokens: mx.array
    """int32 [N, width]."""
    offsets: mx.array
    """int32 [N]: the position of each row's first token; of several chunks, of each token."""
    lengths: tuple[int, ...]
    """Tokens each row holds after this pass (offset + width), as the host knows them."""
    rows: tuple[RowId, ...]
    """Whose caches are read and written. `RowCaches.rows` order is the cheapest."""
    counts: tuple[int, ...] = ()
    """The tokens of each row where these are several rows' chunks; for models that read those."""
    inlays: tuple[Inlay, ...] = ()
    """What stands for tokens, in order, for models that see; of a prefill alone."""
    turns: mx.array | None = None
    """Where tokens stand for rotations, where that is not their position: int32 [N], as `offsets`;
    or [3, N, width], by time, height and width. For models that turn by these three."""
    lasts: tuple[int, ...] = ()
    """The last position that each token sees, all of them in this pass or before it; empty: its
    own. Of a prefill alone."""

    @property
    def turned(self) -> mx.array:
        """Where tokens stand for rotations, as `turns`."""
        return self.offsets if self.turns is None else self.turns

    @property
    def width(self) -> int:
        """Tokens per row."""
        return self.tokens.shape[1]

    @classmethod
    def decode(
        cls,
        tokens: mx.array | Sequence[int],
        offsets: Sequence[int],
        rows: Sequence[RowId],
        *,
        shifts: Sequence[int] = (),
    ) -> Self:
        """Return a batch of one token a row; `tokens` may be an array [N] still being computed.

        shifts: by how much each row stands elsewhere for rotations than at its offset.
        """
        ids = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), dtype=mx.int32)
        return cls(
            tokens=ids.reshape(-1, 1),
            offsets=mx.array(list(offsets), dtype=mx.int32),
            lengths=tuple([offset + 1 for offset in offsets]),
            rows=tuple(rows),
            turns=shift_all(offsets, shifts),
        )

    @classmethod
    def prefill(cls, tokens: Sequence[int], offset: int, row: RowId) -> Self:
        """Return a batch of one row's next `len(tokens)` tokens, the first at position `offset`."""
        return cls(
            tokens=mx.array([list(tokens)], dtype=mx.int32),
            offsets=mx.array([offset], dtype=mx.int32),
            lengths=(offset + len(tokens),),
            rows=(row,),
        )

    def beside(self, parts: Sequence[tuple[Sequence[int], int, RowId]]) -> Self:
        """Return this batch of one token a row with other rows' next tokens, as of `chunks`."""
        assert self.width == 1, "a decode step's"
        assert not self.counts, "of no chunks"
        along = type(self).chunks(parts)
        turns = self.turns
        if turns is not None:
            turns = mx.concatenate([turns, along.offsets])
        return replace(
            along,
            tokens=mx.concatenate([self.tokens, along.tokens]),
            offsets=mx.concatenate([self.offsets, along.offsets]),
            lengths=(*self.lengths, *along.lengths),
            rows=(*self.rows, *along.rows),
            counts=(*(1,) * len(self.rows), *along.counts),
            turns=turns,
        )

    @classmethod
    def chunks(cls, parts: Sequence[tuple[Sequence[int], int, RowId]]) -> Self:
        """Return a batch of several rows' next tokens: each one's, where these start, whose."""
        tokens = [token for ids, _, _ in parts for token in ids]
        positions = [offset + at for ids, offset, _ in parts for at in range(len(ids))]
        return cls(
            tokens=mx.array(tokens, dtype=mx.int32)[:, None],
            offsets=mx.array(positions, dtype=mx.int32),
            lengths=tuple(offset + len(ids) for ids, offset, _ in parts),
            rows=tuple(row for _, _, row in parts),
            counts=tuple(len(ids) for ids, _, _ in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the engine may do with a model; `engine.stepping` chooses by it, once a load.

    What a model does not state is what holds of any written here: it embeds and compiles, no more.
    """

    embeds: bool = True
    """Whether `forward`'s rows are hidden ones, from which texts' vectors are made."""
    compiles: bool = True
    """Whether a decode step may be traced as one function."""
    stays_lazy: bool = False
    """Whether a decode step's `forward` evaluates nothing, so that it may be called early."""
    joins_passes: bool = False
    """Whether it is `JoiningPasses`, reading the weights once for all batches of a joined pass."""
    reads_chunks: bool = False
    """Whether a pass may be several rows' chunks (`Batch.counts`), over sliceable caches."""
    decodes_in_place: bool = False
    """Whether a decode step by slots writes standard caches in place (`attend_joined`)."""
    overlaps_steps: bool = False
    """Whether every decode step writes its caches in place, even while another is under way."""
    turns_apart: bool = False
    """Whether tokens may stand elsewhere for rotations than at their positions (`Batch.turns`), and
    traced and in-place passes turn them by it, a number a token."""
    flat_tokens_max: int = 0
    """Up to how many tokens of several rows' chunks a pass may be traced with: beyond that it
    evaluates its layers a few at a time. 0: such a pass is never traced."""
    prompts_in_place: int = 0
    """Up to how many tokens of short prompts a pass writes in place as well
    (`tokens.is_read_in_place`); 0: none."""
    on_cpu: bool = field(default_factory=runs_cpu)
    """Whether a CPU computes it."""


class Passes(Protocol):
    """What the engine runs: passes over rows, and the head on demand."""

    @property
    def capabilities(self) -> Capabilities:
        """What may be done with it, and by it."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return hidden rows [N * width, hidden], lazy.

        Row i's token j is hidden row `i * width + j`; several chunks are one after another. The
        caller evaluates the result together with the caches' state (prefill: that alone) before the
        next call.
        """

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab] for hidden rows [M, hidden], lazy; only rows that sample."""


class JoiningPasses(Passes, Protocol):
    """Passes of which several may go through the layers together."""

    def forward_joined(self, batches: Sequence[Batch], caches: PassCaches) -> list[mx.array]:
        """Do `forward` for several batches, no row being in two; return each one's hidden rows.

        Over standard caches alone.
        """


class Model(Passes, Protocol):
    """One loaded architecture. Owns its weights; owns no caches."""

    @property
    def context_max(self) -> int:
        """The most tokens a row may hold."""

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in, and its keys and values are."""

    @property
    def attention(self) -> Sequence[AttentionGeometry | None]:
        """What each layer's attention remembers; None for a layer that does not attend."""

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches, one entry a layer; None for a layer without state.

        kv: the form of the layers that remember every position. context_max: no row will be longer
        than this; None where it is the model's.
        """

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, each array once, for the ledger."""


class Sighted(ABC):
    """What a model is besides that sees."""

    @abstractmethod
    def see(self, pixels: mx.array, settings: ImageSettings) -> mx.array:
        """Return the features [N, tokens, (1 + levels) * hidden] of images of one shape, evaluated.

        pixels: uint8 [N, height, width, 3], as `settings` say but for scaling.
        """


def shift_all(offsets: Sequence[int], shifts: Sequence[int]) -> mx.array | None:
    """Return where rows stand for rotations, int32 [N]; None where that is at their offsets."""
    if not any(shifts):
        return None
    places = [offset + shift for offset, shift in zip(offsets, shifts, strict=True)]
    return mx.array(places, dtype=mx.int32)


def plan_pass(batch: Batch, caches: PassCaches, dtype: mx.Dtype) -> StepPlan:
    """Return how a batch meets the caches; masks are of `dtype`."""
    return caches.plan(
        batch.rows,
        offsets=batch.offsets,
        lengths=batch.lengths,
        width=batch.width,
        dtype=dtype,
        counts=batch.counts,
        lasts=batch.lasts,
    )
