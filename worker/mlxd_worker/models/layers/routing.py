"""Which experts a token goes to, and how much each of them counts.

Invariants:
- All of it is float32.
- A correction and the groups decide who is chosen; weights are the shares as the router gave them.
"""

import mlx.core as mx

from mlxd_models.families.common.experts import ExpertsConfig, GroupsConfig, Scoring

LEAST_SUM = 1e-20
"""Added to what shares are divided by: of sigmoids all may be nothing."""


def choose(
    scores: mx.array, config: ExpertsConfig, correction: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return the chosen experts' weights and numbers, both `[M, chosen]`, for scores `[M, count]`.

    correction: `[count]`, where the config asks for one. Lazy.
    """
    soft = config.scoring is Scoring.SOFTMAX
    shares = mx.softmax(scores, axis=-1) if soft else mx.sigmoid(scores)
    wanted = shares if correction is None else shares + correction
    if config.groups is not None:
        wanted = _of_best_groups(wanted, config.groups)
    chosen = mx.argpartition(wanted, kth=-config.chosen, axis=-1)[:, -config.chosen :]
    weights = mx.take_along_axis(shares, chosen, axis=-1)
    if config.normalised:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + LEAST_SUM)
    return weights if config.scaling == 1.0 else weights * config.scaling, chosen


def _of_best_groups(wanted: mx.array, groups: GroupsConfig) -> mx.array:
    """Return how much experts are wanted, -inf for those outside of the best groups."""
    by_group = wanted.reshape(-1, groups.count, wanted.shape[-1] // groups.count)
    worth = mx.topk(by_group, groups.best, axis=-1).sum(axis=-1)
    left_out = mx.argpartition(worth, kth=-groups.kept, axis=-1)[:, : -groups.kept]
    hidden = mx.put_along_axis(
        mx.zeros_like(worth), left_out, mx.array(-mx.inf, dtype=worth.dtype), axis=-1
    )
    return (by_group + hidden[..., None]).reshape(wanted.shape)
