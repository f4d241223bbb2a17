"""Choose the next token of every row, each by its own options, in one lazy graph.

Invariants
- A row's token is a function of its logits, its options, its seed and its position alone:
  neighbours change neither the draw nor any threshold, bit for bit where MLX's scans are sequential
  (CPU).
- The noise belongs to the token id, not to its rank or to its place in a reduced support. So two
  near ties that swap places keep their own noise, and the narrow and the wide path draw the same
  token.
- The order is bias, penalties, top-k, softmax at T, top-p, min-p, draw. The draw is the largest
  of `(logit - max) / T + gumbel`, which is the categorical draw from the normalised survivors.
- Equal logits are ranked by id, lowest first, so every cut is deterministic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import mlx.core as mx

from mlxd_shared.requests import Sampling
from mlxd_worker.engine.penalties import penalised

TOKEN_INVALID: Final = -1
"""Given for a row whose logits hold a NaN, a +inf or nothing above -inf: the model is at fault."""

SUPPORT_WIDTHS: Final = (64, 256, 1024)
"""Widths of a reduced support: few shapes are in use; above the last, all of V is sorted."""

_MASK_64: Final = (1 << 64) - 1
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a draw is for: draws for different purposes at one position are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw: how to choose, and the place in its stream that the noise is keyed by."""

    sampling: Sampling
    position: int
    """Index among the generated tokens of its stream, from 0; a resumed stream counts on."""
    choice: int = 0
    """Which of several completions of one request this is."""
    purpose: Purpose = Purpose.SAMPLE
    recent: Mapping[int, int] = field(default_factory=dict)
    """How often each token occurs among the last ones that the penalties look at."""


def mix64(value: int) -> int:
    """Return SplitMix64's output function of a 64-bit value."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def draw_key(*, seed: int, choice: int, position: int, purpose: Purpose) -> tuple[int, int]:
    """Return the two uint32 words (high, low) that key one draw's noise.

    The hash is part of the product (a resumed stream relies on it): start from 0, and for each of
    seed modulo 2^64, choice, position and purpose, in this order, `state = mix64((state ^ word) +
    gamma)` with SplitMix64's gamma, modulo 2^64.
    """
    state = 0
    for word in (seed & _MASK_64, choice, position, int(purpose)):
        state = mix64(((state ^ word) + _GOLDEN_GAMMA) & _MASK_64)
    return state >> 32, state & 0xFFFFFFFF


def gumbel_noise(keys: mx.array, ids: mx.array) -> mx.array:
    """Return standard Gumbel noise, float32, for each pair of a row's key and a token id.

    keys is uint32 [S, 2]; ids is unsigned [S, K] or [1, K]; the result is [S, K]. Each value
    depends on its key and its id only. Two rounds of murmur3's finaliser give 32 bits a pair; the
    right tail, where draws are decided, is resolved to 2^-33.
    """
    spread = ids.astype(mx.uint32) * mx.array(0x9E3779B1, dtype=mx.uint32)
    bits = _mix32(_mix32(spread ^ keys[:, :1]) ^ keys[:, 1:])
    # 1 - 2^-24 is the largest float32 below 1: at 1 itself the noise would be minus infinity.
    upper = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -mx.log(-mx.log1p(-upper))


def sample(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Return the chosen token of every row, int32 [N], not yet evaluated.

    logits is float32 [N, V], one row a draw; it is not kept. A row whose logits are not usable gets
    TOKEN_INVALID and leaves its neighbours alone. Runs on the engine thread; the caller evaluates,
    once a step. Option values are taken as validated (`mlxd_shared.requests`); a logit-bias id
    outside the vocabulary is a caller's bug.
    """
    rows_count, vocab_size = logits.shape
    assert rows_count == len(draws), "one draw a row"
    assert logits.dtype == mx.float32, "sampling is done in float32"
    logits = _biased(logits, draws)
    logits = penalised(logits, [(draw.sampling, draw.recent) for draw in draws])
    groups: dict[str, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_path_of(draw.sampling, vocab_size), []).append(row)
    chosen = [_sample_group(path, logits, draws, rows) for path, rows in groups.items()]
    tokens = chosen[0] if len(chosen) == 1 else _interleave(chosen, list(groups.values()))
    best = mx.max(logits, axis=-1)
    usable = mx.abs(best) < mx.inf  # false for NaN as well, which max propagates
    return mx.where(usable, tokens.astype(mx.int32), TOKEN_INVALID)


def _mix32(value: mx.array) -> mx.array:
    """Return murmur3's 32-bit finaliser of each element."""
    value = (value ^ (value >> 16)) * mx.array(0x85EBCA6B, dtype=mx.uint32)
    value = (value ^ (value >> 13)) * mx.array(0xC2B2AE35, dtype=mx.uint32)
    return value ^ (value >> 16)


def _biased(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Add every row's logit bias; the result is the input itself where no row has one."""
    entries = [(row, *bias) for row, draw in enumerate(draws) for bias in draw.sampling.logit_bias]
    if not entries:
        return logits
    rows, ids, values = zip(*entries, strict=True)
    assert min(ids) >= 0, "a negative logit-bias id"
    assert max(ids) < logits.shape[1], "a logit-bias id outside the vocabulary"
    return logits.at[mx.array(rows), mx.array(ids)].add(mx.array(values, dtype=mx.float32))


def _top_k(sampling: Sampling, vocab_size: int) -> int:
    """Return how many of the best tokens the row may draw from: all of them where top-k is off."""
    return min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size


def _has_top_p(sampling: Sampling) -> bool:
    return 0.0 < sampling.top_p < 1.0


def _path_of(sampling: Sampling, vocab_size: int) -> str:
    """Name the cheapest way to draw this row; all ways that can express it draw the same token."""
    top_k = _top_k(sampling, vocab_size)
    if sampling.temperature == 0.0:
        return "greedy"
    if top_k <= min(SUPPORT_WIDTHS[-1], vocab_size - 1):
        return "narrow"
    return "sorted" if top_k < vocab_size or _has_top_p(sampling) else "flat"


def _sample_group(
    path: str, logits: mx.array, draws: Sequence[Draw], rows: Sequence[int]
) -> mx.array:
    """Return the tokens [S] of the rows that take one path, in the order given."""
    if len(rows) < len(draws):
        logits = logits[mx.array(list(rows))]
    if path == "greedy":
        return mx.argmax(logits, axis=-1)
    group = [draws[row] for row in rows]
    options = [draw.sampling for draw in group]
    words = [
        draw_key(seed=d.sampling.seed, choice=d.choice, position=d.position, purpose=d.purpose)
        for d in group
    ]
    keys = mx.array(words, dtype=mx.uint32)
    if path == "flat":
        return _draw_flat(logits, options, keys)
    ids = _support(logits, options, path)
    return _draw_ranked(mx.take_along_axis(logits, ids, axis=-1), ids, options, keys)


def _support(logits: mx.array, options: Sequence[Sampling], path: str) -> mx.array:
    """Return the ids of the best tokens, uint32 [S, K], best first and equals by id."""
    vocab_size = logits.shape[1]
    if path == "sorted":
        return mx.argsort(-logits, axis=-1)
    widest = max(_top_k(option, vocab_size) for option in options)
    width = min(next(w for w in SUPPORT_WIDTHS if w >= widest), vocab_size)
    # MLX ranks equals by index in both calls, so ids in rising order first make the second one
    # exact.
    ids = mx.sort(mx.argpartition(-logits, width - 1, axis=-1)[:, :width], axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)


def _scaled(logits: mx.array, options: Sequence[Sampling]) -> mx.array:
    """Return (logits - row maximum) / T: never above 0, so a tiny temperature cannot overflow."""
    temperatures = mx.array([[option.temperature] for option in options], dtype=mx.float32)
    return (logits - mx.max(logits, axis=-1, keepdims=True)) / temperatures


def _draw_flat(logits: mx.array, options: Sequence[Sampling], keys: mx.array) -> mx.array:
    """Draw over the whole vocabulary, for rows that no cut by rank concerns."""
    scores = _scaled(logits, options)
    if any(option.min_p > 0.0 for option in options):
        floors = mx.array([[option.min_p] for option in options], dtype=mx.float32)
        scores = mx.where(mx.exp(scores) >= floors, scores, -mx.inf)
    ids = mx.arange(logits.shape[1], dtype=mx.uint32)[None]
    return mx.argmax(scores + gumbel_noise(keys, ids), axis=-1)


def _draw_ranked(
    logits: mx.array, ids: mx.array, options: Sequence[Sampling], keys: mx.array
) -> mx.array:
    """Draw from a support [S, K] that is ranked best first."""
    width = logits.shape[1]
    columns = [
        (
            float(_top_k(option, width)),
            option.top_p if _has_top_p(option) else mx.inf,
            option.min_p,
        )
        for option in options
    ]
    table = mx.array(columns, dtype=mx.float32)
    ranks = mx.arange(width, dtype=mx.float32)[None]
    scores = _scaled(logits, options)
    # Weights are relative to the best token's, which is 1: min-p needs no normaliser, and top-p
    # only the last prefix sum, which trailing zeros do not change.
    weights = mx.where(ranks < table[:, 0:1], mx.exp(scores), 0.0)
    before = mx.cumsum(weights, axis=-1, inclusive=False)
    total = before[:, -1:] + weights[:, -1:]
    kept = (before < table[:, 1:2] * total) & (weights >= table[:, 2:3])
    kept = kept & (ranks < table[:, 0:1])
    best = mx.argmax(mx.where(kept, scores + gumbel_noise(keys, ids), -mx.inf), axis=-1)
    return mx.take_along_axis(ids, best[:, None], axis=-1)[:, 0]


def _interleave(parts: Sequence[mx.array], rows: Sequence[Sequence[int]]) -> mx.array:
    """Put the groups' tokens back into row order."""
    flat = [row for part in rows for row in part]
    back = sorted(range(len(flat)), key=flat.__getitem__)
    return mx.concatenate([part.astype(mx.uint32) for part in parts])[mx.array(back)]
