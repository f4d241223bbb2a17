"""What the prefix cache knows of a running row, until the row leaves.

Invariants:
- States that a row captures are its own until they go into the trie or are closed.
- A row that waits for blocks has no captures planned: its future position is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.disk.arrivals import Arrivals
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.prefix.lookup import Lookup

States = Mapping[Kind, Snapshot]
"""What the layers that cannot be cut held at one offset."""


@dataclass(slots=True)
class Tenant:
    """One running row, and the states captured on its way that are not in the trie yet."""

    prompt: Sequence[int]
    lookup: Lookup
    """What has become of the prompt so far."""
    points: list[int] = field(default_factory=list)
    """Where to capture, the next one first."""
    states: dict[int, States] = field(default_factory=dict)
    """By offset, ascending."""
    published: bool = False
    """Whether the prompt is in the trie; captures are those of generated text from then on."""
    arrivals: Arrivals | None = None
    """What the row waits for."""

    @property
    def nbytes(self) -> int:
        """The bytes that the captured states own."""
        return sum(state.nbytes for states in self.states.values() for state in states.values())

    def keep_last(self, count: int) -> None:
        """Close all but the last `count` states that the row captured."""
        for offset in list(self.states)[: len(self.states) - count]:
            for state in self.states.pop(offset).values():
                state.close()
