"""Mixture of experts: a few of many networks for each row, and what is shared beside them.

Invariants:
- The choice of experts is made in float32, whatever the rows are. A correction and the groups
  decide who is chosen; weights are the shares as the router gave them.
- On a GPU everything is lazy. On a CPU, where a product gathers experts one row at a time and in
  float32 alone, the choice is evaluated and each expert gets its rows at once where that pays or
  nothing else is there.
"""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd_models.families.common.experts import (
    CORRECTION,
    EXPERT_DOWN,
    EXPERT_GATED,
    FUSED_DOWN,
    FUSED_GATED,
    ExpertsConfig,
    GroupsConfig,
    Scoring,
    SharedConfig,
    expert_stack,
)
from mlxd_models.families.common.tensors import Stack
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.weights.expert_linear import (
    ExpertLinear,
    ExpertProjection,
    SummedExperts,
)
from mlxd_worker.models.weights.fused import clamped_halves, gated_halves
from mlxd_worker.models.weights.linear import Projection, Weighted
from mlxd_worker.models.weights.reader import Reader

ORDERED_MIN = 64
"""From so many choices on they are put in the experts' order: reading each expert once pays."""

EACH_MIN = 4
"""From so many rows for each expert on, two products an expert are faster on a CPU than two that
gather (64 experts of 384, 8 chosen, rows of 1024, one thread: 24 against 80 ms for 8 rows, 77
against 91 for 32, 269 against 113 for 128, 1030 against 213 for 512)."""

LEAST_SUM = 1e-20
"""Added to what shares are divided by: of sigmoids all may be nothing."""


@dataclass(frozen=True, slots=True)
class Shared(Weighted):
    """One network for all rows, beside the experts; each row may have a gate for it."""

    gate_up: Projection
    down: Projection
    width: int
    gate: Projection | None = None

    def __call__(self, normed: mx.array) -> mx.array:
        """Return what it makes of normalised rows."""
        output = self.down(gated_halves(self.gate_up(normed), width=self.width))
        return output if self.gate is None else mx.sigmoid(self.gate(normed)) * output


@dataclass(frozen=True, slots=True)
class Experts(Weighted):
    """A few of many networks for each row, weighted by how much the router wants them."""

    config: ExpertsConfig
    norm: Norm
    router: Projection
    expert_gate_up: ExpertProjection
    expert_down: ExpertProjection
    shared: Shared | None = None
    correction: mx.array | None = None
    """float32 [experts]: added to each one's share for the choice alone."""

    def __call__(self, rows: mx.array) -> mx.array:
        """Return the rows with what their experts make of them added."""
        normed = mx.fast.rms_norm(rows, self.norm.weight, self.norm.eps)
        weights, chosen = self._choose(normed)
        one_by_one = self._one_by_one(normed.dtype, chosen.size)
        out = (self._by_expert if one_by_one else self._gather)(normed, chosen)
        mixed = (out * weights[..., None]).sum(axis=1)
        if isinstance(self.expert_down, SummedExperts):
            mixed = self.expert_down.complete(mixed, weights, chosen)
        return rows + (mixed if self.shared is None else mixed + self.shared(normed))

    def _choose(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """Return the chosen experts' weights, of the rows' type, and their numbers: [M, chosen]."""
        scores = self.router(normed).astype(mx.float32)
        weights, chosen = choose(scores, self.config, self.correction)
        return weights.astype(normed.dtype), chosen

    def _one_by_one(self, dtype: mx.Dtype, choices: int) -> bool:
        """Tell whether each expert is to get its rows at once."""
        if not runs_cpu():
            return False
        # What is packed, or halves: no product gathers these there, or one slower than this.
        gathered = isinstance(self.expert_gate_up, ExpertLinear) and dtype == mx.float32
        return not gathered or choices >= EACH_MIN * self.config.count

    def _gather(self, normed: mx.array, chosen: mx.array) -> mx.array:
        """Return [M, chosen, hidden] by products that gather each row's expert; lazy."""
        if chosen.size < ORDERED_MIN:
            out = self._activate(self.expert_gate_up(normed[:, None, None], chosen, ordered=False))
            return self.expert_down(out, chosen, ordered=False).squeeze(-2)
        order, back = _orders(chosen)
        experts = chosen.reshape(-1)[order]
        # Reshaped: the strides of a new axis lead MLX's grouped products on CUDA astray (0.32.4).
        gathered = normed[order // chosen.shape[1]].reshape(-1, 1, normed.shape[-1])
        out = self._activate(self.expert_gate_up(gathered, experts, ordered=True))
        out = self.expert_down(out, experts, ordered=True)[back]
        return out.reshape(*chosen.shape, -1)

    def _by_expert(self, normed: mx.array, chosen: mx.array) -> mx.array:
        """Return [M, chosen, hidden] by two products an expert; evaluates the choice."""
        order, back = _orders(chosen)
        numbers = mx.arange(self.config.count)[:, None]
        counts = cast("list[int]", (chosen.reshape(1, -1) == numbers).sum(axis=1).tolist())
        gathered = normed[order // chosen.shape[1]]
        spans = _spans(counts)
        both = [self.expert_gate_up.of(e)(gathered[a:b]) for e, a, b in spans]
        out = self._gate(mx.concatenate(both, axis=0))
        out = mx.concatenate([self.expert_down.of(e)(out[a:b]) for e, a, b in spans], axis=0)
        return out[back].reshape(*chosen.shape, -1)

    def _activate(self, both: mx.array) -> mx.array:
        flat = both.reshape(-1, both.shape[-1])
        return self._gate(flat).reshape(*both.shape[:-1], -1)

    def _gate(self, flat: mx.array) -> mx.array:
        if self.config.clamp is not None:
            return clamped_halves(flat, width=self.config.mlp, clamp=self.config.clamp)
        return gated_halves(flat, width=self.config.mlp)


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


def take_experts(config: ExpertsConfig, weights: Reader, prefix: str, norm: Norm) -> Experts:
    """Take the weights of a layer's experts."""
    return Experts(
        config=config,
        norm=norm,
        router=weights.linear([prefix + config.router], has_bias=config.biased),
        expert_gate_up=_take_stack(config, weights, prefix, EXPERT_GATED, fused=FUSED_GATED),
        expert_down=_take_stack(config, weights, prefix, (EXPERT_DOWN,), fused=FUSED_DOWN),
        shared=None if config.shared is None else _take_shared(config.shared, weights, prefix),
        correction=weights.take_float32(f"{prefix}{CORRECTION}") if config.corrected else None,
    )


def _take_stack(
    config: ExpertsConfig, weights: Reader, prefix: str, names: tuple[str, ...], *, fused: str
) -> ExpertProjection:
    if config.fused and weights.has(f"{prefix}{fused}.weight"):
        return weights.experts([Stack(prefix + fused, ())])
    stacks = [expert_stack(prefix, name, config) for name in names]
    return weights.experts(stacks, has_bias=config.biased)


def _take_shared(config: SharedConfig, weights: Reader, prefix: str) -> Shared:
    module = f"{prefix}mlp.{config.name}"
    return Shared(
        gate_up=weights.linear([f"{module}.{name}" for name in EXPERT_GATED]),
        down=weights.linear([f"{module}.{EXPERT_DOWN}"]),
        width=config.mlp,
        gate=weights.linear([f"{module}_gate"]) if config.gated else None,
    )


def _orders(chosen: mx.array) -> tuple[mx.array, mx.array]:
    """Return what puts flat choices in the experts' order, and what puts them back."""
    order = mx.argsort(chosen.reshape(-1))
    return order, mx.argsort(order)


def _spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """Return each expert that has rows, with the first of them and the one after the last."""
    spans, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, first, first + count))
        first += count
    return spans
