"""Choose the next token of every row, each by its own options, in one lazy graph.

Invariants
- A row's token is a function of its logits, its options, its masks, its seed and its position
  alone: neighbours change neither the draw nor any threshold, bit for bit.
- The noise belongs to the token id, not to its rank or to its place in a reduced support. So two
  near ties that swap places keep their own noise, and the narrow and the wide path draw the same
  token.
- The order is bias, penalties, masks, top-k, softmax at T, top-p, min-p, xtc, draw. The draw is the
  largest of `(logit - max) / T + gumbel`, which is the categorical draw from the normalised
  survivors. Greedy takes the best that the masks leave.
- Equal logits are ranked by id, lowest first, so every cut is deterministic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Self

import mlx.core as mx

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.engine.masks.masks import AllowedTokens, mask_logits
from mlxd_worker.engine.sampling.columns import Columns, KeptColumns, draw_keys, words_of
from mlxd_worker.engine.sampling.penalties import penalise
from mlxd_worker.engine.sampling.ranking import best_ids
from mlxd_worker.engine.sampling.weights import unit_sum, unit_sums_before
from mlxd_worker.engine.sampling.xtc import Ends, without_top_choices
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.picking import pick

TOKEN_INVALID: Final = -1
"""Given for a row whose logits hold a NaN, a +inf or nothing above -inf: the model is at fault."""

TOKEN_NONE: Final = -2
"""Given for a row whose masks left nothing above -inf: what its request asks for is impossible."""

TOKEN_WIDE: Final = -3
"""Given for a hopeful draw whose nucleus the widest support does not hold: draw it again."""

SUPPORT_WIDTHS: Final = (64, 256, 1024)
"""Widths of a reduced support: few shapes are in use; above the last, all of V is sorted."""

NEAR_TIE: Final = 1e-3
"""Final scores (penalised logit / T + noise; greedy: the logit) that differ by less may change
places with the way of rounding: a prompt is evaluated in other shapes than what follows it."""

NEAR_TIE_T_MIN: Final = 0.01
"""A lower temperature counts as this one there: it would make rounding alone larger than that."""

SLICE_VALUES: Final = 1 << 19
"""How many logits are sampled from at once on a CPU; a row has as many as it has."""


class Purpose(IntEnum):
    """What a draw is for: draws for different purposes at one position are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    XTC = 3


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
    forbidden: tuple[int, ...] = ()
    """Ids that cannot be drawn here: another one is."""
    mask: AllowedTokens | None = None
    """The only tokens that can be drawn here; None for all."""
    ends: tuple[int, ...] = ()
    """Ids that end the stream; xtc leaves a position alone rather than drop one."""
    watched: bool = False
    """Whether to find out if another token was too near to call (`drawing`)."""


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


def sample(
    logits: mx.array,
    draws: Sequence[Draw],
    *,
    hopeful: bool = False,
    against: mx.array | None = None,
    kept: KeptColumns | None = None,
) -> mx.array:
    """Return the chosen token of every row, int32 [N], not yet evaluated.

    logits is float32 [N, V], one row a draw; it keeps its values. A row whose logits are not usable
    gets TOKEN_INVALID, one whose masks leave nothing TOKEN_NONE; they leave their neighbours alone.
    hopeful: a row with top-p and without top-k may look at the widest support alone, and gets
    TOKEN_WIDE where that does not hold its nucleus. Else it gets the same token, for less.
    against: a token of every row, int32 [N], whose final score counts as lower by `NEAR_TIE`: one
    that is drawn all the same was no near tie. A negative one means nothing.
    kept: where the same rows' last columns are.
    Runs on the engine thread; the caller evaluates, once a step. Option values are taken as
    validated (`mlxd_shared.domain.requests`); an id outside the vocabulary is a caller's bug.
    """
    rows_count, vocab_size = logits.shape
    assert rows_count == len(draws), "one draw a row"
    assert logits.dtype == mx.float32, "sampling is done in float32"
    logits = _add_bias(logits, draws)
    logits = penalise(logits, [(draw.sampling, draw.recent) for draw in draws])
    if against is not None:
        logits = _lower(logits, against, draws)
    allowed = mask_logits(_without_forbidden(logits, draws), [draw.mask for draw in draws])
    kept = KeptColumns() if kept is None else kept
    options = tuple([draw.sampling for draw in draws])
    groups = kept.paths(options, lambda: _paths_of(options, vocab_size, hopeful=hopeful))
    parts = [
        (path, some) for path, rows in groups.items() for some in _slices(path, rows, vocab_size)
    ]
    chosen = [_sample_group(path, allowed, draws, rows, kept) for path, rows in parts]
    tokens = chosen[0] if len(parts) == 1 else _interleave(chosen, [rows for _, rows in parts])
    if allowed is not logits:
        tokens = mx.where(mx.max(allowed, axis=-1) > -mx.inf, tokens, TOKEN_NONE)
    best = mx.max(logits, axis=-1)
    usable = mx.abs(best) < mx.inf  # false for NaN as well, which max propagates
    return mx.where(usable, tokens, TOKEN_INVALID)


def needs_second_look(sampling: Sampling, vocab_size: int) -> bool:
    """Tell whether a hopeful draw by these options may give TOKEN_WIDE."""
    return _path_of(sampling, vocab_size, hopeful=True) == "nucleus"


def _mix32(value: mx.array) -> mx.array:
    """Return murmur3's 32-bit finaliser of each element."""
    value = (value ^ (value >> 16)) * mx.array(0x85EBCA6B, dtype=mx.uint32)
    value = (value ^ (value >> 13)) * mx.array(0xC2B2AE35, dtype=mx.uint32)
    return value ^ (value >> 16)


def _add_bias(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Add every row's logit bias; the result is the input itself where no row has one."""
    entries = [(row, *bias) for row, draw in enumerate(draws) for bias in draw.sampling.logit_bias]
    if not entries:
        return logits
    rows, ids, values = zip(*entries, strict=True)
    assert min(ids) >= 0, "a negative logit-bias id"
    assert max(ids) < logits.shape[1], "a logit-bias id outside the vocabulary"
    return logits.at[mx.array(rows), mx.array(ids)].add(mx.array(values, dtype=mx.float32))


def _lower(logits: mx.array, tokens: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Lower the logit of every row's token by what lowers its final score by `NEAR_TIE`."""
    temperatures = [draw.sampling.temperature or 1.0 for draw in draws]
    steps = [NEAR_TIE * max(temperature, NEAR_TIE_T_MIN) for temperature in temperatures]
    rows = mx.arange(len(draws))
    return logits.at[rows, mx.maximum(tokens, 0)].add(-mx.array(steps, dtype=mx.float32))


def _without_forbidden(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Put every row's forbidden ids to -inf; the result is the input itself where none has any."""
    entries = [(row, token) for row, draw in enumerate(draws) for token in draw.forbidden]
    if not entries:
        return logits
    rows, ids = zip(*entries, strict=True)
    assert min(ids) >= 0, "a negative forbidden id"
    assert max(ids) < logits.shape[1], "a forbidden id outside the vocabulary"
    result = logits[:]  # an object of its own: the caller's keeps its values
    result[mx.array(rows), mx.array(ids)] = -mx.inf
    return result


def _top_k(sampling: Sampling, vocab_size: int) -> int:
    """Return how many of the best tokens the row may draw from: all of them where top-k is off."""
    return min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size


def _path_of(sampling: Sampling, vocab_size: int, *, hopeful: bool) -> str:
    """Name the cheapest way to draw this row; all ways that can express it draw the same token."""
    top_k = _top_k(sampling, vocab_size)
    if sampling.temperature == 0.0:
        return "greedy"
    if top_k <= min(SUPPORT_WIDTHS[-1], vocab_size - 1):
        return "narrow"
    if top_k < vocab_size:
        return "sorted"
    if not 0.0 < sampling.top_p < 1.0:
        return "flat"
    return "nucleus" if hopeful and vocab_size > SUPPORT_WIDTHS[-1] else "sorted"


def _paths_of(
    options: Sequence[Sampling], vocab_size: int, *, hopeful: bool
) -> dict[str, list[int]]:
    """Return the rows of each path."""
    groups: dict[str, list[int]] = {}
    for row, option in enumerate(options):
        groups.setdefault(_path_of(option, vocab_size, hopeful=hopeful), []).append(row)
    return groups


def _slices(path: str, rows: Sequence[int], vocab_size: int) -> list[Sequence[int]]:
    """Cut a group's rows so that the temporaries of one slice stay small, and near the CPU."""
    if path == "greedy" or not runs_cpu():  # one large call is cheapest
        return [rows]
    width = max(SLICE_VALUES // vocab_size, 1)
    return [rows[start : start + width] for start in range(0, len(rows), width)]


def _sample_group(
    path: str,
    logits: mx.array,
    draws: Sequence[Draw],
    rows: Sequence[int],
    kept: KeptColumns,
) -> mx.array:
    """Return the tokens, int32 [S], of the rows that take one path, in the order given."""
    if len(rows) < len(draws):
        logits = logits[mx.array(list(rows))]
    if path == "greedy":
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    own = [draws[row] for row in rows]
    options = tuple([draw.sampling for draw in own])
    columns = kept.of(path, rows[0], options, tuple([draw.choice for draw in own]))
    group = _Group.of(own, columns, logits)
    if path == "flat":
        return _draw_flat(logits, group)
    ids = best_ids(logits, _width(path, options, logits.shape[1]))
    total = unit_sum(mx.exp(_scale(logits, columns))) if path == "nucleus" else None
    return _draw_ranked(pick(logits, ids), ids, group, total)


@dataclass(frozen=True, slots=True)
class _Group:
    """What the rows of one path ask for at their places."""

    columns: Columns
    keys: mx.array
    """uint32 [S, 2]: what the noise is keyed by."""
    thresholds: mx.array | None
    """xtc's, float32 [S, 1], inf for a row that it leaves alone; None where it does all."""
    ends: Ends | None

    @classmethod
    def of(cls, draws: Sequence[Draw], columns: Columns, logits: mx.array) -> Self:
        """Return what `draws` of these columns ask for; their logits [S, V] are given."""
        positions = [draw.position for draw in draws]
        keys = draw_keys(columns.states, positions, [draw.purpose for draw in draws])
        thresholds = _xtc_thresholds(columns, positions)
        acting = min(thresholds) < math.inf
        return cls(
            columns,
            keys=mx.array(words_of(keys), dtype=mx.uint32),
            thresholds=mx.array(thresholds, dtype=mx.float32)[:, None] if acting else None,
            ends=_ends_of(draws, logits) if acting else None,
        )

    def exclude_top(self, scores: mx.array, logits: mx.array, ids: mx.array) -> mx.array:
        """Return the scores after xtc; the input itself where it leaves every row alone."""
        if self.thresholds is None or self.ends is None:
            return scores
        return without_top_choices(scores, logits, ids, thresholds=self.thresholds, ends=self.ends)


def _xtc_thresholds(columns: Columns, positions: Sequence[int]) -> list[float]:
    """Return the probabilities from which on xtc drops tokens; inf: it does not act there.

    Whether it acts is a draw of its own purpose, so it depends on seed, choice and position alone.
    """
    if columns.xtc is None:
        return [math.inf] * len(positions)
    keys = draw_keys(columns.states, positions, [Purpose.XTC] * len(positions))
    # Uniform in [0, 1): a chance of 1 always acts.
    return [
        threshold if (key >> 11) * 2.0**-53 < chance else math.inf
        for key, (chance, threshold) in zip(keys, columns.xtc, strict=True)
    ]


def _ends_of(draws: Sequence[Draw], logits: mx.array) -> Ends:
    """Return the ids that end each row, filled up to one width."""
    width = max(1, *(len(draw.ends) for draw in draws))
    filled = [(*draw.ends, *(0,) * (width - len(draw.ends))) for draw in draws]
    ids = mx.array(filled, dtype=mx.uint32)
    counts = mx.array([[len(draw.ends)] for draw in draws])
    own = mx.arange(width)[None] < counts
    return Ends(ids, mx.where(own, pick(logits, ids), -mx.inf))


def _width(path: str, options: Sequence[Sampling], vocab_size: int) -> int:
    """Return how many of the best tokens the rows of one path look at."""
    if path == "sorted":
        return vocab_size
    if path == "nucleus":
        return SUPPORT_WIDTHS[-1]
    widest = max(_top_k(option, vocab_size) for option in options)
    return min(next(width for width in SUPPORT_WIDTHS if width >= widest), vocab_size)


def _scale(logits: mx.array, columns: Columns) -> mx.array:
    """Return (logits - row maximum) / T: never above 0, so a tiny temperature cannot overflow."""
    return (logits - mx.max(logits, axis=-1, keepdims=True)) / columns.temperatures


def _draw_flat(logits: mx.array, group: _Group) -> mx.array:
    """Draw over the whole vocabulary, for rows that no cut by rank concerns."""
    scores = _scale(logits, group.columns)
    if any(option.min_p > 0.0 for option in group.columns.options):
        scores = mx.where(mx.exp(scores) >= group.columns.cuts[:, 2:3], scores, -mx.inf)
    ids = mx.arange(logits.shape[1], dtype=mx.uint32)[None]
    scores = group.exclude_top(scores, logits, ids)
    return mx.argmax(scores + gumbel_noise(group.keys, ids), axis=-1).astype(mx.int32)


def _draw_ranked(
    logits: mx.array, ids: mx.array, group: _Group, total: mx.array | None
) -> mx.array:
    """Draw from a support [S, K] that is ranked best first.

    total: the weight [S, 1] of the whole vocabulary, where the support may lack a part of it; it is
    then TOKEN_WIDE where a token beyond the support might be drawn. None: nothing is lacking.
    """
    table = group.columns.cuts
    ranks = mx.arange(logits.shape[1], dtype=mx.float32)[None]
    scores = _scale(logits, group.columns)
    # Weights are relative to the best token's, which is 1, so min-p needs no normaliser.
    weights = mx.where(ranks < table[:, 0:1], mx.exp(scores), 0.0)
    before = unit_sums_before(weights)
    end = table[:, 1:2] * (unit_sum(weights) if total is None else total)
    within = before < end
    kept = within & (weights >= table[:, 2:3]) & (ranks < table[:, 0:1])
    scores = group.exclude_top(mx.where(kept, scores, -mx.inf), logits, ids)
    best = mx.argmax(scores + gumbel_noise(group.keys, ids), axis=-1)
    tokens = pick(ids, best[:, None])[:, 0].astype(mx.int32)
    if total is None:
        return tokens
    # What follows the support weighs no more than its last one, and comes after all of its weight.
    beyond = (unit_sum(weights) < end) & (weights[:, -1:] >= table[:, 2:3])
    return mx.where(beyond[:, 0], TOKEN_WIDE, tokens)


def _interleave(parts: Sequence[mx.array], rows: Sequence[Sequence[int]]) -> mx.array:
    """Put the groups' tokens back into row order."""
    flat = [row for part in rows for row in part]
    back = sorted(range(len(flat)), key=flat.__getitem__)
    return mx.concatenate(list(parts))[mx.array(back)]
