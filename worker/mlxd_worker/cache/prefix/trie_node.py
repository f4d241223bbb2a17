"""The parts of the prefix trie: keys, nodes, and what a look-up answers. Pure, without MLX.

Invariants:
- A key is its tokens as bytes, `TOKEN_NBYTES` each, so that comparing two runs is one `memcmp`.
- A node stands for the tokens [start, stop) behind its parent; the root for none, [0, 0).
- `Node.spared` remembers what a use that ended inside the edge did not use, so that a later split
  gives each side the history of its own tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NewType, Protocol, Self, TypeVar

TOKEN_NBYTES = 4

Key = NewType("Key", bytes)
"""Tokens as unsigned native 32-bit integers, one after another."""


class TrieError(Exception):
    """A bug of the caller: a snapshot that does not fit its key, or more use than was matched."""


class KindLike(Protocol):
    """What layers remember (`cache.base.Kind`); hashable."""

    @property
    def sliceable(self) -> bool:
        """Whether every token's entry stands for itself."""


class SnapshotLike(Protocol):
    """What the trie asks of a snapshot (`cache.snapshot.Snapshot`)."""

    start: int
    stop: int
    on_materialise: Callable[[int], None] | None

    @property
    def nbytes(self) -> int:
        """The bytes owned; grows at most once, telling the hook by how much."""

    @property
    def row(self) -> object:
        """Whose memory a lazy one names; None for one that owns its bytes."""

    def split(self, at: int) -> tuple[Self | None, Self | None]:
        """Return what lies before `at` and from there on; only asked of sliceable kinds."""

    def close(self) -> None:
        """Give back what is owned; called exactly once."""


K = TypeVar("K", bound=KindLike)
S = TypeVar("S", bound=SnapshotLike)


def key_of(tokens: Sequence[int]) -> Key:
    """Return the key of `tokens`; any thread, so that it can be made off the engine's.

    Raises:
        OverflowError: a token is negative or 2**32 or more.
    """
    return Key(array("I", tokens).tobytes())


def length(key: Key) -> int:
    """Return how many tokens a key has."""
    return len(key) // TOKEN_NBYTES


def part(key: Key, start: int, stop: int) -> Key:
    """Return the tokens [start, stop) of a key."""
    return Key(key[start * TOKEN_NBYTES : stop * TOKEN_NBYTES])


def common(edge: Key, key: Key, at: int) -> int:
    """Return with how many tokens `edge` agrees with what `key` has from token `at` on."""
    offset = at * TOKEN_NBYTES
    if key.startswith(edge, offset):
        return length(edge)
    low, high = 0, min(length(edge), length(key) - at)
    # [0, low) agrees; halves are compared as a whole, so all in all it reads each byte about once.
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(part(edge, low, middle), offset + low * TOKEN_NBYTES):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class Uses:
    """How often something was used, and when last, in the trie's own count of requests."""

    count: int
    last: int


class Node(Generic[K, S]):
    """One edge of the trie and what its tokens left behind. Read it; only the trie writes."""

    __slots__ = (
        "children",
        "edge",
        "landed",
        "nbytes",
        "parent",
        "passed",
        "snapshots",
        "spared",
        "start",
        "stop",
    )

    def __init__(self, parent: Node[K, S] | None, edge: Key, now: int) -> None:
        """Make a node behind `parent`, unlinked; None makes a root."""
        self.parent = parent
        self.edge = edge
        self.start: int = 0 if parent is None else parent.stop
        self.stop: int = self.start + length(edge)
        self.children: dict[bytes, Node[K, S]] = {}
        """By first token."""
        self.snapshots: dict[K, S] = {}
        self.nbytes = 0
        """The bytes that the snapshots own now."""
        self.passed = Uses(1, now)
        """Requests whose prompt led through the edge, the one that made it included."""
        self.landed = Uses(1, now)
        """Requests that were restored to exactly the edge's end."""
        self.spared: tuple[int, Uses] | None = None
        """Where the last use ended inside the edge, and the uses of what lies behind."""

    @property
    def first(self) -> bytes:
        """The edge's first token, by which the parent finds it."""
        return self.edge[:TOKEN_NBYTES]

    @property
    def whole_nbytes(self) -> int:
        """The part of the bytes that whole-state kinds own."""
        return sum(s.nbytes for kind, s in self.snapshots.items() if not kind.sliceable)

    def use(self, now: int, used: int) -> None:
        """Note a request that used the edge's tokens before `used`."""
        if used >= self.stop:
            self.spared = None
        elif self.spared is None:
            self.spared = (used, Uses(self.passed.count, self.passed.last))
        else:
            self.spared = (max(used, self.spared[0]), self.spared[1])
        self.passed = Uses(self.passed.count + 1, now)

    def cut_front(self, at: int, now: int) -> Node[K, S]:
        """Link a new parent for the tokens before `at`, inside the edge; snapshots stay."""
        parent = self.parent
        assert parent is not None, "the root has no edge"
        front: Node[K, S] = Node(parent, part(self.edge, 0, at - self.start), now)
        front.passed = Uses(self.passed.count, self.passed.last)
        if self.spared is not None and self.spared[0] <= at:
            front.spared = self.spared if self.spared[0] < at else None
            self.passed, self.spared = self.spared[1], None
        parent.children[front.first] = front
        self.edge = part(self.edge, at - self.start, self.stop - self.start)
        self.start, self.parent = at, front
        front.children[self.first] = self
        return front

    def take_front(self) -> None:
        """Unlink the parent, of which this is the only child, and stand for its tokens too.

        The uses become the parent's; its own, where older, are kept for a later split.
        """
        front = self.parent
        assert front is not None, "the root has no edge"
        assert front.parent is not None, "the root has no edge"
        if self.passed.last < front.passed.last:
            self.spared = (self.start, self.passed)
        self.passed = Uses(
            max(front.passed.count, self.passed.count), max(front.passed.last, self.passed.last)
        )
        self.edge = Key(front.edge + self.edge)
        self.start, self.parent = front.start, front.parent
        self.parent.children[self.first] = self
        front.parent = None

    def ancestors(self) -> Iterator[Node[K, S]]:
        """Yield the nodes from the parent up to the root."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def key(self) -> Key:
        """Return all tokens from the root to the node's end."""
        edges = [self.edge, *(node.edge for node in self.ancestors())]
        return Key(b"".join(reversed(edges)))

    def __repr__(self) -> str:
        kinds = " ".join(str(kind) for kind in self.snapshots)
        return f"<node [{self.start}, {self.stop}) {kinds}>"


@dataclass(frozen=True, slots=True)
class Match(Generic[K, S]):
    """How far a key is in the trie; holds until the trie changes next."""

    path: tuple[Node[K, S], ...]
    """From below the root to the node where the matched tokens end, inside its edge or at it."""
    count: int
    """Tokens matched, exactly."""

    @property
    def cut_nbytes(self) -> int:
        """The bytes that sliceable kinds own of the matched tokens: what hangs behind needs them.

        Of an edge that matched in part, the same part of its bytes, rounded up.
        """
        total = 0
        for node in self.path:
            matched, tokens = min(node.stop, self.count) - node.start, node.stop - node.start
            total += -(-(node.nbytes - node.whole_nbytes) * matched // tokens)
        return total

    def parts(self, kind: K) -> list[S]:
        """Return what the path holds of `kind`, in order.

        Of a sliceable kind the parts join without gap from token 0 to at least `count`; of a
        whole-state kind each stands for the tokens before its `stop`, which may be beyond `count`
        in the last.
        """
        return [node.snapshots[kind] for node in self.path if kind in node.snapshots]
