"""What stands before a decoder's layers and behind them: embedding, last norm, head.

Invariants:
- A head that is the embedding is kept once, and named once.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxd_models.families.common.decoder_tensors import EMBEDDING, FINAL_NORM, HEAD
from mlxd_worker.kernels.vector import Norm
from mlxd_worker.models.building import Weights
from mlxd_worker.models.layers.fused import logits_of
from mlxd_worker.models.weights.linear import Projection, named_arrays

_EMBEDDING, _HEAD = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Ends:
    """One model's ends; their type is the model's."""

    embedding: Projection
    norm: Norm
    head: Projection

    def embedded(self, ids: mx.array) -> mx.array:
        """Return the rows [M, hidden] of token ids of any shape, lazy."""
        return self.embedding.lookup(ids.reshape(-1))

    def normed(self, rows: mx.array) -> mx.array:
        """Return the last layer's rows, normalised, lazy."""
        return mx.fast.rms_norm(rows, self.norm.weight, self.norm.eps)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab] for normalised rows, lazy."""
        return logits_of(hidden, self.head)

    def arrays(self) -> dict[str, mx.array]:
        """Return the weights by name, each array once."""
        named = {FINAL_NORM: self.norm.weight} | named_arrays(_EMBEDDING, self.embedding)
        return named if self.head is self.embedding else named | named_arrays(_HEAD, self.head)


def take_embedding(weights: Weights) -> Projection:
    """Take the embedding, which is read before the layers."""
    return weights.linear([_EMBEDDING])


def take_ends(weights: Weights, embedding: Projection, norm: Norm, *, tied_head: bool) -> Ends:
    """Take the head, where it is not the embedding, and put the ends together."""
    return Ends(embedding, norm, embedding if tied_head else weights.linear([_HEAD]))
