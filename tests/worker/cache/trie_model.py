"""Snapshots for tests of the trie that know which tokens they hold, and what the trie must keep.

What stands for a token also depends on all tokens before it, so a fake's content is one tag for
each prefix: the wrong history is caught, and not only the wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeAlias

from mlxd_worker.cache.prefix.trie import PrefixTrie
from mlxd_worker.cache.prefix.trie_node import Node, key_of

Tokens: TypeAlias = tuple[int, ...]
Tags: TypeAlias = tuple[int, ...]


class Kind(Enum):
    """The kinds of a model, without MLX."""

    STANDARD = "standard"
    QUANTIZED = "quantized"
    ROTATING = "rotating"
    RECURRENT = "recurrent"

    @property
    def sliceable(self) -> bool:
        """Whether a range of tokens can be kept."""
        return self in (Kind.STANDARD, Kind.QUANTIZED)


NBYTES = {Kind.STANDARD: 16, Kind.QUANTIZED: 5, Kind.ROTATING: 64, Kind.RECURRENT: 200}
"""A token of a sliceable kind; a state of any other."""


class Ended(Exception):
    """A snapshot was used after its end."""


class Snapshot:
    """One kind's share of a prefix."""

    def __init__(
        self,
        book: Book,
        kind: Kind,
        start: int,
        stop: int,
        held: Tags,
        *,
        row: int | None = None,
    ) -> None:
        self.book = book
        self.kind = kind
        self.start = start
        self.stop = stop
        self.held = held
        self.row = row
        self.on_materialise: Callable[[int], None] | None = None
        book.open.add(self)

    @property
    def lazy(self) -> bool:
        """Whether a running row holds what it names."""
        return self.row is not None

    @property
    def owned_nbytes(self) -> int:
        """What it takes once it is not lazy."""
        return NBYTES[self.kind] * len(self.held)

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return 0 if self.lazy else self.owned_nbytes

    def end(self) -> None:
        """Be used up."""
        if self not in self.book.open:
            raise Ended(self.kind)
        self.book.open.remove(self)

    def close(self) -> None:
        """Give everything back."""
        self.end()
        self.book.closed += 1

    def materialise(self) -> None:
        """Be copied out, as when the row that a lazy snapshot names goes on."""
        if self not in self.book.open:
            raise Ended(self.kind)
        assert self.lazy
        self.row = None
        if self.on_materialise is not None:
            self.on_materialise(self.nbytes)

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        """Cut what can be cut."""
        if self not in self.book.open:
            raise Ended(self.kind)
        if not self.kind.sliceable or at <= self.start:
            return None, self
        if at >= self.stop:
            return self, None
        self.end()
        front, back = self.held[: at - self.start], self.held[at - self.start :]
        return (
            Snapshot(self.book, self.kind, self.start, at, front, row=self.row),
            Snapshot(self.book, self.kind, at, self.stop, back, row=self.row),
        )


class Book:
    """All snapshots that have not ended."""

    def __init__(self) -> None:
        self.open: set[Snapshot] = set()
        self.closed = 0
        self.rows = 0

    @property
    def live(self) -> int:
        """How many are open."""
        return len(self.open)

    @property
    def nbytes(self) -> int:
        """What they own."""
        return sum(snapshot.nbytes for snapshot in self.open)

    def take(self, kind: Kind, tokens: Tokens, start: int = 0, *, lazy: bool = False) -> Snapshot:
        """Snapshot a row that holds `tokens`, of a sliceable kind from `start` on."""
        first = start if kind.sliceable else 0
        self.rows += 1
        row = self.rows if lazy else None
        return Snapshot(self, kind, first, len(tokens), tags(kind, tokens, first), row=row)

    def merge(self, parent: Snapshot, child: Snapshot) -> Snapshot:
        """Make one of two of a sliceable kind."""
        assert parent.kind is child.kind
        assert parent.stop == child.start
        assert parent.row == child.row, "merging would copy what a running row still holds"
        parent.end()
        child.end()
        held = parent.held + child.held
        return Snapshot(self, parent.kind, parent.start, child.stop, held, row=parent.row)


def tags(kind: Kind, tokens: Tokens, start: int) -> Tags:
    """Return what a snapshot of [start, end of `tokens`) holds: one tag for each prefix."""
    if not kind.sliceable:
        return (hash((kind.value, tokens)),)
    return tuple(hash((kind.value, tokens[: i + 1])) for i in range(start, len(tokens)))


Trie: TypeAlias = PrefixTrie[Kind, Snapshot]


def tokens_of(node: Node[Kind, Snapshot]) -> Tokens:
    """Return all tokens up to a node's end."""
    return tuple(memoryview(node.key()).cast("I"))


def put(
    trie: Trie,
    book: Book,
    tokens: Sequence[int],
    kinds: Sequence[Kind] = (Kind.STANDARD,),
    *,
    start: int | None = None,
    lazy: bool = False,
) -> Node[Kind, Snapshot] | None:
    """Insert a row's end with snapshots of `kinds`, from where the trie's own end by default."""
    key = key_of(tokens)
    first = trie.match(key).count if start is None else start
    taken = {
        kind: book.take(kind, tuple(tokens), first, lazy=lazy and kind.sliceable)
        for kind in kinds
        if not kind.sliceable or first < len(tokens)
    }
    return trie.insert(key, taken)


def remove(trie: Trie, node: Node[Kind, Snapshot]) -> None:
    """Have a node go with all behind it, as evictions take one leaf after another."""
    behind = [node]
    for inner in behind:
        behind += inner.children.values()
        trie._empty(inner)
    trie._unlink(node)


def check(trie: Trie, book: Book, kinds: Sequence[Kind], edge_tokens: int) -> None:
    """Assert the trie's invariants, but for the merging of nodes (see `mergeable`)."""
    sliceable = {kind for kind in kinds if kind.sliceable}
    held: list[Snapshot] = []
    for node in trie.nodes():
        assert node.parent is not None
        assert node.parent.children[node.first] is node
        assert node.start == node.parent.stop < node.stop
        assert node.start // edge_tokens == (node.stop - 1) // edge_tokens
        assert node.snapshots or node.children, "a leaf keeps something"
        assert sliceable <= set(node.snapshots), "each sliceable kind at each node"
        tokens = tokens_of(node)
        assert len(tokens) == node.stop
        for kind, snapshot in node.snapshots.items():
            assert snapshot.kind is kind
            start = node.start if kind.sliceable else 0
            assert (snapshot.start, snapshot.stop) == (start, node.stop)
            assert snapshot.held == tags(kind, tokens, start)
            held.append(snapshot)
        assert node.nbytes == sum(snapshot.nbytes for snapshot in node.snapshots.values())
    assert len(held) == len(set(held)) == book.live, "none leaked, none held twice"
    assert trie.nbytes == book.nbytes


def mergeable(trie: Trie, edge_tokens: int) -> list[Node[Kind, Snapshot]]:
    """Return the nodes that nothing keeps apart from their only child."""
    return [
        node
        for node in trie.nodes()
        if len(node.children) == 1
        and all(kind.sliceable for kind in node.snapshots)
        and all(
            (child.stop - 1) // edge_tokens == node.start // edge_tokens
            for child in node.children.values()
        )
    ]


class Stand:
    """A trie, its book, and the kinds of one model."""

    def __init__(self, *kinds: Kind, edge_tokens: int = 64) -> None:
        self.kinds = kinds or (Kind.STANDARD,)
        self.book = Book()
        self.edge_tokens = edge_tokens
        self.trie: Trie = PrefixTrie(self.kinds, self.book.merge, edge_tokens=edge_tokens)

    def put(
        self, *tokens: int, kinds: tuple[Kind, ...] | None = None, start: int | None = None,
        lazy: bool = False,
    ) -> Node[Kind, Snapshot]:  # fmt: skip
        """Insert and see to it that it was kept."""
        kinds = self.kinds if kinds is None else kinds
        node = put(self.trie, self.book, tokens, kinds, start=start, lazy=lazy)
        assert node is not None
        self.check()
        return node

    def match(self, *tokens: int, limit: int | None = None) -> int:
        """Return how much is there."""
        return self.trie.match(key_of(tokens), limit=limit).count

    def use(self, *tokens: int, used: int | None = None) -> None:
        """Make a request of the trie."""
        match = self.trie.match(key_of(tokens))
        self.trie.touch(match, used=match.count if used is None else used)

    def ends(self) -> set[Tokens]:
        """Return all nodes, by the tokens up to their ends."""
        return {tokens_of(node) for node in self.trie.nodes()}

    def check(self) -> None:
        """Assert the invariants."""
        check(self.trie, self.book, self.kinds, self.edge_tokens)
