"""A rank's part of a checkpoint: to the reader the parts are the tensors.

Invariants:
- Outputs are divided stem by stem: of joined queries, keys and values a rank has its part of each,
  and of experts its part of every one.
- A linear whose inputs are divided is `Summed`: nothing that fuses a product with what stands after
  it takes it, because the sum over the ranks comes between.
- Only the rank's part is read, or, where it lies in short stripes, kept of what is read.
- No group of packed values is on two ranks: what is packed on loading is, bit for bit, the rank's
  part of what one process would pack.
- A bias that is added to a sum is whole on every rank, and added once, after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxd_models.families.common.tensors import Stack
from mlxd_models.fit.parts import ROWS
from mlxd_worker.models.weights.expert_linear import (
    ExpertProjection,
    ExpertsSideBySide,
    SummedExperts,
)
from mlxd_worker.models.weights.linear import AddRanks, Projection, Summed
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a model a process has."""

    rank: int
    ranks: int
    add: AddRanks


class ShareReader(Reader):
    """The tensors of a checkpoint of which a rank has its parts."""

    def __init__(self, share: Share, *known: Any, **options: Any) -> None:  # noqa: ANN401
        """Know the tensors of which `share` is this process's; the rest is as `Reader` has it."""
        super().__init__(*known, **options)
        self._share = share

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return this rank's part of linears over one input as one."""
        if not stems[0].endswith(ROWS):
            return super().linear(stems, has_bias=has_bias)
        bias = self.take(f"{stems[0]}.bias") if has_bias else None
        return Summed(self._linear(stems, has_bias=False), self._share.add, bias)

    def experts(self, stacks: Sequence[Stack], *, has_bias: bool = False) -> ExpertProjection:
        """Return this rank's part of experts' linears over one input as one."""
        if not stacks[0].stem.endswith(ROWS):
            return super().experts(stacks, has_bias=has_bias)
        part = super().experts(stacks)
        assert not isinstance(part, ExpertsSideBySide | SummedExperts), "one stack, and a part"
        stored = [self._stored_stems(stack) for stack in stacks]
        bias = self._stack(stored, "bias", self.dtype) if has_bias else None
        return SummedExperts(part, self._share.add, bias)


def share_reader(share: Share) -> Callable[..., Reader]:
    """Return what makes a `Reader` of this share."""
    return partial(ShareReader, share)
