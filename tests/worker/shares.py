"""A model's ranks in one process: each one's part, and what they compute together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlxd_models.describe import Description
from mlxd_models.families.common.decoder import DecoderConfig
from mlxd_models.families.common.packing import Recipe
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.cache.base import RowId
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import load_model
from mlxd_worker.models.weights.linear import AddRanks
from mlxd_worker.models.weights.shards import Share
from tests.worker.tiny import caches_of, forced_logits, ignore_progress


class _NotKnownYet(Exception):
    def __init__(self, partial: mx.array) -> None:
        self.partial = partial


class Sums:
    """What ranks add, one rank being run after another: sums that all have made are known."""

    def __init__(self) -> None:
        self.known: list[mx.array] = []
        self.met = 0

    def add(self, partial: mx.array) -> mx.array:
        """Return the next sum; raises where it is not known."""
        if self.met == len(self.known):
            raise _NotKnownYet(partial)
        self.met += 1
        return self.known[self.met - 1]


def load_ranks(
    files: Description,
    ranks: int,
    add: AddRanks,
    *,
    form: FloatType,
    packed: bool = False,
    on_load: Recipe | None = None,
) -> list[Model]:
    """Return every rank's part of a model, which add by `add`."""
    return [
        load_model(
            files,
            form=form,
            progress=ignore_progress,
            packed=packed,
            on_load=on_load,
            share=Share(rank, ranks, add),
        )
        for rank in range(ranks)
    ]


def logits_together(models: Sequence[Model], tokens: Sequence[int], sums: Sums) -> list[mx.array]:
    """Return each rank's logits of all positions, its sums taken over all of them.

    Ranks go one after another up to the first sum that is not known, again for each sum.
    """
    while True:
        partials, logits = [], []
        for model in models:
            sums.met = 0
            try:
                logits.append(forced_logits(model, caches_of(model), RowId(1), tokens, cuts=[]))
            except _NotKnownYet as place:
                mx.eval(place.partial)
                partials.append(place.partial)
        if not partials:
            return logits
        assert not logits, "all ranks take equally many sums"
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        sums.known.append(total)


def put_together(
    config: DecoderConfig, parameters: Sequence[Mapping[str, mx.array]], whole: Mapping[str, Any]
) -> dict[str, mx.array]:
    """Return the whole's arrays by name, each made of the ranks' parts of it."""
    named = [{n.replace(".part.", "."): a for n, a in each.items()} for each in parameters]
    assert all(each.keys() == whole.keys() for each in named)
    return {
        name: _join(_segments(config, name), [each[name] for each in named], whole[name])
        for name in whole
    }


def _segments(config: DecoderConfig, name: str) -> tuple[int, ...]:
    """Return the shares of what an array is joined of, each divided by itself."""
    if name.rpartition(".")[0].endswith(".qkv"):
        return (config.heads, config.kv_heads, config.kv_heads)
    return (1, 1) if name.rpartition(".")[0].endswith("gate_up") else (1,)


def _join(segments: Sequence[int], parts: Sequence[mx.array], whole: mx.array) -> mx.array:
    if parts[0].shape == whole.shape:
        assert all(mx.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    pairs = enumerate(zip(parts[0].shape, whole.shape, strict=True))
    (axis,) = [axis for axis, (own, all_) in pairs if own != all_]
    unit = parts[0].shape[axis] // sum(segments)
    ends = [unit * sum(segments[: count + 1]) for count in range(len(segments) - 1)]
    apart = [mx.split(part, ends, axis=axis) if ends else [part] for part in parts]
    return mx.concatenate([piece for pieces in zip(*apart, strict=True) for piece in pieces], axis)
