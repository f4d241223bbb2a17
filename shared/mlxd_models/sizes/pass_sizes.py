"""What evaluating tokens takes besides weights and caches, from a model's widths alone. Pure.

Invariants:
- On a CPU a worker keeps MLX to these sums: it evaluates no further ahead than fits (0026).
- What is alive at once follows from the operations that the worker does, one layer's at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_shared import config

BLOCK_QUERIES = 128
"""Positions of a chunk that are attended at once on a CPU: each block reads only what its last one
sees, and its scores stay in a core's cache (512 of 512: 168 ms for 8 layers, 314 at once)."""

SCORES_ALIVE = 4
"""Times that a block's attention scores are there: products, exponentials in parts and joined, and
the next block's products."""

SCORES_BEYOND = 3
"""Times more that they may be there: MLX looks at its limit once in ten dispatches, within which a
block's exponentials, these joined, and the next block's products can all be begun. One of them is
of a block that reads as many positions less as a block has; counted for two, peaks were beyond."""

PIECE_TOKENS_MIN = 64
"""A chunk that wraps in a sliding window is attended in pieces of a window, and of so many tokens
at least. A piece reads the window before it and itself: on a CPU 512 tokens in a window of 128 take
160 ms a layer, and 460 ms at once."""

PIECE_SCORES_ALIVE = 3
"""Times that a piece's scores are there, products, masked and exponentials: it is evaluated before
the next one begins."""

RECURRENT_VALUE_NBYTES = 4
"""What comes of a recurrent layer's convolution is float32 whatever the model computes in."""

LOGITS_ALIVE = 2
"""Times that the logits of a step are there: as the head gives them, and as the options change
them. Most of what a draw makes of them is made for a few rows at a time."""

LOGIT_NBYTES = 4

DRAFTED_TOKENS_MAX = 64
"""Guesses of one step, all rows together: so many more rows of logits than rows."""

POOL_NBYTES = 32 * config.MIB
"""What MLX keeps of freed buffers for reuse, at least; a worker sets it."""

POOL_CUDA_NBYTES_MAX = 1024 * config.MIB
"""What it keeps at most on a CUDA device, whose arrays live until a part of a step is done. What
the pool does not hold of them the driver takes back and gives anew, in every step: with 128 rows of
an 8 B model a dispatch took the host 7.6 ms with 32 MiB, 3.5 with 1 GiB, no less with 8 (0115).
"""

POOL_ROW_TIMES = 2
"""Times that a row's arrays of a whole step are kept: those of 128 rows of an 8 B model were 0.6 GB
where this gives 1."""

TOGETHER_ALIVE = 3
"""Times that the scores of several rows' chunks are there: products, masked and exponentials."""

TOGETHER_NBYTES = 4
"""There they are float32 where no kernel has them, and so is a copy of the keys."""


TOGETHER_POSITIONS = 8192
"""Of all rows that a CPU reads in one pass: more do not pay, because rows that are no neighbours
are copied. A model of 20 MB reads 20 more tokens of eight rows of 900 in 1,592 ms one by one, 663
as neighbours, 810 copied; of two rows of 3,000 in 614, 666 and 791. Larger weights pay for longer.
"""


@dataclass(frozen=True, slots=True)
class Together:
    """What a layer's attention may have at once of several rows' chunks, read together."""

    positions: int
    """Of all rows, those included that make shorter rows as long as others; they may be copied."""
    scores: int
    """A head's."""
    queries: int
    """Of all rows, those included that make shorter chunks as wide as others."""


def together_max(context: int, *, on_cpu: bool) -> Together:
    """Return what the chunks of one pass may have of rows of up to `context` tokens.

    On a CPU it is less than a prompt's blocks may take: half of a block's scores, a copy of no
    more positions than the context has, in any model whose heads have up to 192 values, and as many
    queries as a chunk has. Elsewhere it is as much as whole passes of short prompts need.
    """
    if on_cpu:
        positions, scores = min(context, TOGETHER_POSITIONS), BLOCK_QUERIES // 2 * context
        return Together(positions, scores, config.PREFILL_CHUNK_TOKENS)
    tokens = config.PREFILL_PASS_TOKENS
    scores = max(BLOCK_QUERIES * context, 256 * tokens)
    return Together(max(context, 2 * tokens), scores, 2 * tokens)


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The widths that decide what one position's evaluation takes, in values."""

    hidden: int
    projected: int
    """What the widest layer projects a position to: queries, keys, values, gates."""
    mlp: int
    heads: int
    vocab: int
    recurrent: int = 0
    """What a recurrent layer's convolution and recurrence make of a position; float32."""

    def nbytes(
        self, caches: CacheSizes, *, context: int, rows: int, item_nbytes: int, on_cpu: bool
    ) -> int:
        """Return the most that a pass takes: a prompt's widest chunk, or a step of all rows."""
        prefill = self._on_cpu if on_cpu else self._elsewhere
        guesses = min(DRAFTED_TOKENS_MAX, rows * config.SPECULATION_DEPTH_MAX)
        logits = LOGITS_ALIVE * (rows + guesses) * self.vocab * LOGIT_NBYTES
        return max(prefill(caches, context, item_nbytes), logits)

    def pool_nbytes(self, values: int, *, rows: int, item_nbytes: int, on_cuda: bool) -> int:
        """Return what MLX keeps of freed buffers, of a model of so many values.

        All of a row's arrays together have about as many values as the model has, divided by its
        width; a mixture of experts' have fewer. No more is kept than a byte a value, but for the
        least, which is all where the width is not known (`zoo_sizes`).
        """
        if not on_cuda or self.hidden <= 1:
            return POOL_NBYTES
        row_nbytes = values // self.hidden * item_nbytes
        most = min(values, POOL_CUDA_NBYTES_MAX)
        return max(min(POOL_ROW_TIMES * rows * row_nbytes, most), POOL_NBYTES)

    def beyond_nbytes(self, caches: CacheSizes, *, context: int, item_nbytes: int) -> int:
        """Return by how much a pass on a CPU goes beyond the limit that MLX is given."""
        chunk = min(config.PREFILL_CHUNK_TOKENS, context)
        if caches.kv_values_per_token:
            block = min(BLOCK_QUERIES, chunk)
            before = max(context - block, block)
            seen = (SCORES_BEYOND - 1) * context + before
            return self.heads * block * seen * item_nbytes
        # Windows are evaluated piece by piece: what is begun is a layer's norm and projections.
        # Measured of two models: 4.3 to 6.4 MB where this is 4.2, and 5.3 to 5.7 where it is 6.3.
        begun = self.hidden + self.projected if caches.windows else 0
        return chunk * begun * item_nbytes

    def _on_cpu(self, caches: CacheSizes, context: int, item_nbytes: int) -> int:
        chunk = min(config.PREFILL_CHUNK_TOKENS, context)
        # Residual and norm; the products, then rotated, then what was read, in order.
        around = chunk * (2 * self.hidden + 3 * self.projected)
        attention = (around + _scores(caches, self.heads, chunk, context)) * item_nbytes
        attention += self.beyond_nbytes(caches, context=context, item_nbytes=item_nbytes)
        # Gates and ups, their products in parts and joined.
        feed_forward = chunk * (3 * self.hidden + 4 * self.mlp) * item_nbytes
        recurrent = 0
        if self.recurrent:
            recurrent = chunk * (2 * self.hidden + 2 * self.projected) * item_nbytes
            recurrent += chunk * self.recurrent * RECURRENT_VALUE_NBYTES
        return max(attention, feed_forward, recurrent)

    def _elsewhere(self, caches: CacheSizes, context: int, item_nbytes: int) -> int:
        """A GPU is given a whole pass before it begins: nothing is known to be gone sooner.

        A longer pass is attended a chunk's queries at a time, or as several rows' chunks. What has
        layers that do not keep every position, and mlx-lm's models, are read by chunks alone.
        """
        chunk = min(config.PREFILL_CHUNK_TOKENS, context)
        wide = 3 * self.hidden + self.projected + 3 * self.mlp
        attended = chunk * 2 * self.heads * context * item_nbytes
        if not reads_passes(self, caches):
            of_chunk = chunk * (wide * item_nbytes + self.recurrent * RECURRENT_VALUE_NBYTES)
            return of_chunk + attended
        most, entry = together_max(context, on_cpu=False), caches.kv_heads * caches.head_dim
        together = TOGETHER_ALIVE * self.heads * most.scores * TOGETHER_NBYTES
        # Keys and values, and what queries become, as they are; keys and queries also widened.
        apart_nbytes = 2 * item_nbytes + TOGETHER_NBYTES
        together += most.positions * entry * apart_nbytes
        together += most.queries * self.heads * caches.head_dim * apart_nbytes
        return config.PREFILL_PASS_TOKENS * wide * item_nbytes + max(attended, together)


def reads_passes(sizes: PassSizes, caches: CacheSizes) -> bool:
    """Tell whether a fast device reads such a model in passes of more than a chunk.

    Layers that keep every position can; windows, recurrent states and mlx-lm's caches cannot.
    """
    return not (sizes.recurrent or caches.windows or caches.foreign)


def routed_width(chosen: int, hidden: int, mlp: int) -> int:
    """Return the widest part of what `chosen` experts make of one position, in values."""
    return chosen * (hidden + mlp)


def _scores(caches: CacheSizes, heads: int, chunk: int, context: int) -> int:
    """Return the attention scores alive at once on a CPU, of the widest kind of layer."""
    whole = SCORES_ALIVE * heads * min(BLOCK_QUERIES, chunk) * context
    scores = [whole] if caches.kv_values_per_token else [0]
    for layers in caches.windows:
        piece = min(max(layers.window, PIECE_TOKENS_MIN), chunk)
        seen = min(layers.window, context) + piece
        unwrapped = SCORES_ALIVE * heads * min(BLOCK_QUERIES, chunk) * min(layers.window, context)
        # Beside a piece's scores what it reads, put in order, and the masks of all pieces.
        read = seen * (2 * caches.kv_heads * caches.head_dim + chunk)
        scores += [PIECE_SCORES_ALIVE * heads * piece * seen + read, unwrapped]
    return max(scores)
