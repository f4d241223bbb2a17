"""A sound model, but for a fault that is planted where a fast path is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.models.base import Batch, Capabilities, JoiningPasses, Model
from mlxd_worker.proof.subjects import Subject

Spoil = Callable[[mx.array], mx.array]
"""What becomes of logits."""


class PlantedModel:
    """A Llama whose logits go through `spoil`."""

    def __init__(self, model: Model, spoil: Spoil) -> None:
        self._model = model
        self._spoil = spoil

    @property
    def capabilities(self) -> Capabilities:
        """The model's own."""
        return self._model.capabilities

    @property
    def vocab_size(self) -> int:
        """The model's own."""
        return self._model.vocab_size

    @property
    def context_max(self) -> int:
        """The model's own."""
        return self._model.context_max

    @property
    def dtype(self) -> mx.Dtype:
        """The model's own."""
        return self._model.dtype

    @property
    def attention(self) -> Sequence[AttentionGeometry | None]:
        """The model's own."""
        return self._model.attention

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return the model's own."""
        return self._model.new_caches(kv=kv, context_max=context_max)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the model's own."""
        return self._model.parameters()

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Do the model's own pass."""
        return self._model.forward(batch, caches)

    def forward_joined(self, batches: Sequence[Batch], caches: PassCaches) -> list[mx.array]:
        """Do the model's own passes."""
        model: JoiningPasses = self._model  # type: ignore[assignment]
        return model.forward_joined(batches, caches)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the model's own logits, spoilt."""
        return self._spoil(self._model.logits(hidden))


def plant(subject: Subject, spoil: Spoil) -> Subject:
    """Return the subject with a fault."""
    return replace(subject, make=partial(_make, subject, spoil))


def _make(subject: Subject, spoil: Spoil) -> PlantedModel:
    return PlantedModel(subject.make(), spoil)
