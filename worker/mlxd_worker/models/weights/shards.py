"""A rank's part of a checkpoint: each linear is read, or cut, as the rank has it.

Invariants:
- Outputs are divided stem by stem: of joined queries, keys and values a rank has its part of each.
- A linear whose inputs are divided is `Summed`: nothing that fuses a product with what stands after
  it takes it, because the sum over the ranks comes between.
- Of what is divided by outputs only the rank's part is read. What is divided by inputs is read
  whole, one at a time, and cut: its parts are strewn over the whole of it.
- A bias that is added to a sum is whole on every rank, and added once, after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlxd_models.families.common.decoder import SINKS
from mlxd_models.fit.shares import COLUMNS, ROWS
from mlxd_worker.models.weights.direct_reading import WORDS
from mlxd_worker.models.weights.linear import Linear, Projection, Summed
from mlxd_worker.models.weights.reader import Reader


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a model a process has."""

    rank: int
    ranks: int
    group: mx.distributed.Group

    def span(self, count: int) -> range:
        """Return the rank's places of `count`, which the ranks divide."""
        width = count // self.ranks
        return range(self.rank * width, (self.rank + 1) * width)


class ShareReader(Reader):
    """The tensors of a checkpoint of which a rank has a share; weights in numbers alone."""

    def __init__(self, share: Share, *known: Any, **options: Any) -> None:  # noqa: ANN401
        """Know the tensors of which `share` is this process's; the rest is as `Reader` has it."""
        super().__init__(*known, **options)
        self._share = share

    def take(self, name: str) -> mx.array:
        """Return one tensor, evaluated, as `dtype`; of scores of heads this rank's."""
        if not name.endswith(SINKS):
            return super().take(name)
        return self._outputs([name])

    def linear(self, stems: Sequence[str], *, has_bias: bool = False) -> Projection:
        """Return this rank's part of linears over one input as one."""
        if stems[0].endswith(ROWS):
            bias = self.take(f"{stems[0]}.bias") if has_bias else None
            return Summed(self._inputs(stems[0]), self._share.group, bias)
        if not stems[0].endswith(COLUMNS):
            return super().linear(stems, has_bias=has_bias)
        bias = self._outputs([f"{stem}.bias" for stem in stems]) if has_bias else None
        return Linear(self._outputs([f"{stem}.weight" for stem in stems]), bias)

    def _inputs(self, stem: str) -> Linear:
        whole = self.take(f"{stem}.weight")
        span = self._share.span(whole.shape[1])
        part = mx.contiguous(whole[:, span.start : span.stop])
        mx.eval(part)
        return Linear(part)

    def _outputs(self, names: Sequence[str]) -> mx.array:
        """Return this rank's part of each tensor's first axis, joined, evaluated, as `dtype`."""
        spans = {name: self._share.span(self.shape(name)[0]) for name in names}
        shape = (sum(map(len, spans.values())), *self.shape(names[0])[1:])
        array = self._lazy.read(list(spans.items()), shape, dtype=WORDS[self.dtype])
        if array is None:  # made here of something else, or stored in several types
            parts = [self._pop(name)[span.start : span.stop] for name, span in spans.items()]
            array = self._join_lazily(parts, names, 0, self.dtype)
        array = array.astype(self.dtype)
        self._finish_reading(array, names)
        return array


def share_reader(share: Share) -> Callable[..., Reader]:
    """Return what makes a `Reader` of this share."""
    return partial(ShareReader, share)
