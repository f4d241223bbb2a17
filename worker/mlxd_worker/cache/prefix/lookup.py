"""How much of a prompt the snapshots on its path give back, and why no more. Pure.

Invariants:
- All layers of a row stand at one offset, so the target is the same for all kinds: the most tokens
  that each of them can be brought to.
- Kinds that can be cut need snapshots without a gap from 0 on; for each other kind there must be
  one that ends at the target, or from which the kind can go back to it by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_worker.cache.base import Kind


class Held(Protocol):
    """What a choice needs to know of a snapshot."""

    @property
    def kind(self) -> Kind:
        """Of which layers."""

    @property
    def start(self) -> int:
        """The first position kept, for kinds that can be cut."""

    @property
    def stop(self) -> int:
        """The end of the positions kept, or the length that the state stands for."""


PUT_BACK_MIN: Final = 64
"""Fewer tokens are read anew where passes write in place: no pass over a prompt is over fewer
there, while putting them back waits for all that is under way. And every prompt shares a few tokens
with others, those with which a text or a chat begins."""


S = TypeVar("S", bound=Held)
Rewinds = Callable[[Kind, int, int], bool]
"""Takes a kind, an offset and a target: whether layers of the kind go back there by themselves."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What became of one prompt in the prefix cache."""

    total: int
    """Tokens of the prompt."""
    cached: int
    """Tokens whose state was put back."""
    matched: int
    """Tokens found in the trie, whether or not every kind could be brought there."""
    reason: CacheReason
    """Why it was not more."""
    from_disk: int = 0
    """Of those whose state was put back, how many came from the disk."""

    @property
    def left(self) -> int:
        """Tokens to evaluate, at least one."""
        return self.total - self.cached

    @property
    def hit(self) -> bool:
        """Whether anything was reused."""
        return self.cached > 0

    def read_up_to(self, offset: int) -> Lookup:
        """Return what it is once the disk has brought the row to `offset`."""
        if offset == self.cached:
            return self
        reason = CacheReason.NONE if offset == self.total - 1 else self.reason
        more = self.from_disk + offset - self.cached
        return replace(self, cached=offset, reason=reason, from_disk=more)


@dataclass(slots=True)
class PrefixCounts:
    """What prefix caches have done, since the process began."""

    lookups: Counter[tuple[bool, CacheReason]] = field(default_factory=Counter)
    """By hit and reason."""
    hit_tokens: int = 0
    disk_tokens: int = 0
    """Those of them that came from disk."""
    evictions: int = 0
    evicted_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Target(Generic[S]):
    """How far a row can be brought, and with which snapshots, those of a kind in order."""

    offset: int
    parts: tuple[S, ...]


def worth_putting_back(tokens: int, *, in_place: bool) -> int:
    """Return how many of so many tokens are put back: all, or none where reading them is less."""
    return 0 if in_place and tokens < PUT_BACK_MIN else tokens


def best_target(
    path: Sequence[Mapping[Kind, S]], limit: int, *, kinds: Sequence[Kind], rewinds: Rewinds
) -> Target[S]:
    """Return the most tokens, at most `limit`, to which snapshots on the path bring every kind.

    `path` holds the snapshots of each node from the root down, the last one maybe matched in part.
    """
    chains = {kind: _chain(path, kind, limit) for kind in kinds if kind.sliceable}
    states = {
        kind: [node[kind] for node in path if kind in node] for kind in kinds if not kind.sliceable
    }
    reach = min((chain[-1].stop if chain else 0 for chain in chains.values()), default=limit)
    limit = min(limit, reach)
    stops = (snapshot.stop for held in states.values() for snapshot in held)
    for offset in sorted({limit, *(stop for stop in stops if stop < limit)}, reverse=True):
        candidates = [_state_for(offset, held, rewinds) for held in states.values()]
        chosen = [state for state in candidates if state is not None]
        if offset > 0 and len(chosen) == len(candidates):
            cut = [part for chain in chains.values() for part in chain if part.start < offset]
            return Target(offset, (*cut, *chosen))
    return Target(0, ())


def begin_alike(prompt: Sequence[int], other: Sequence[int], count: int) -> bool:
    """Tell whether two prompts have their first `count` tokens, one or more, in common. Pure.

    Most that do not differ in the last of these: then nothing is copied, however long they are.
    """
    if len(other) < count or prompt[count - 1] != other[count - 1]:
        return False
    return prompt[:count] == other[:count]


def _chain(path: Sequence[Mapping[Kind, S]], kind: Kind, limit: int) -> list[S]:
    """Return the kind's snapshots from 0 on up to `limit`, as far as there is no gap."""
    chain: list[S] = []
    reach = 0
    for node in path:
        part = node.get(kind)
        if part is None or part.start > reach or reach >= limit:
            break
        chain.append(part)
        reach = part.stop
    return chain


def _state_for(offset: int, held: Sequence[S], rewinds: Rewinds) -> S | None:
    """Return a state at `offset`, or else the nearest one beyond from which the kind goes back."""
    beyond = sorted((state for state in held if state.stop >= offset), key=lambda s: s.stop)
    for state in beyond:
        if state.stop == offset or rewinds(state.kind, state.stop, offset):
            return state
    return None
