"""The prefix trie: which runs of tokens are kept, and the snapshots that stand for them. Pure.

Every row of a worker shares one trie. A row that restores from it gets a copy, so nothing in here
is ever in use by a row: a node may be evicted while a row that was restored from it runs on.

Invariants:
- Siblings share no first token. An edge has at least one token and crosses no multiple of
  `edge_tokens`: this bounds what a split or a merge may have to copy, and what one eviction frees.
- Each node holds one snapshot of each sliceable kind of the model, which spans exactly its edge.
  A whole-state kind's stands at its node's end; a node may lack it.
- A node with one child, no user mark and no whole-state snapshot is one with its child, unless
  their edges meet at a multiple of `edge_tokens`. Where one is lazy and the other owned, or of
  another row, they stay two, since merging would copy what a row still holds, until an insert
  passes after that has changed.
- A leaf has a snapshot.
- `nbytes` is the sum of what the snapshots own, also after lazy ones have materialised.
- A snapshot handed over is closed exactly once: here, or by the `split` or `merge` it went into.
- Time is the number of requests told to `touch`; the trie has no clock.

One owner: the engine thread. Should a snapshot's `split` or `merge` raise (out of memory), the
trie's structure is undefined and `clear` is the only call left; it closes whatever is reachable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import takewhile
from typing import Generic, NamedTuple

from mlxd_worker.cache.prefix.eviction import (
    RERANK_REQUESTS,
    Candidate,
    Ranking,
    Value,
    reuse_value,
)
from mlxd_worker.cache.prefix.trie_node import (
    TOKEN_NBYTES,
    K,
    Key,
    Match,
    Node,
    S,
    TrieError,
    Uses,
    common,
    length,
    part,
)

EDGE_TOKENS_MAX = 1024
"""The longest edge. The shorter, the less is copied where prompts part and the finer the budget is
used; the longer, the fewer parts a restored row is put together from (32 for 32k tokens)."""


DOOMED_MAX = 32
"""Ends of prompts that are looked at for what goes next."""


class Evicted(NamedTuple):
    """What an eviction took: the tokens [start, end of `key`), or only the states kept there."""

    key: Key
    start: int
    nbytes: int
    states_only: bool


class PrefixTrie(Generic[K, S]):
    """What is kept of past rows, by their tokens."""

    def __init__(
        self,
        kinds: Collection[K],
        merge: Callable[[S, S], S],
        *,
        value: Value[K, S] = reuse_value,
        edge_tokens: int = EDGE_TOKENS_MAX,
        rerank_requests: int = RERANK_REQUESTS,
    ) -> None:
        """Make an empty trie for a model whose layers are of `kinds`.

        `merge` makes one snapshot of two adjacent ones and uses both up. `value` says what an
        eviction takes first: what is worth least, as of at most `rerank_requests` requests ago.
        """
        self._sliceable = tuple(dict.fromkeys(kind for kind in kinds if kind.sliceable))
        self._whole = tuple(dict.fromkeys(kind for kind in kinds if not kind.sliceable))
        self._merge = merge
        self._value = value
        self._edge_tokens = edge_tokens
        self._root: Node[K, S] = Node(None, Key(b""), 0)
        self._now = 0
        self.nbytes = 0
        """The bytes that all snapshots in here own."""
        self._evictable: Ranking[K, S] = Ranking(self._worth, rerank_requests=rerank_requests)

    def nodes(self) -> Iterator[Node[K, S]]:
        """Yield every node but the root, parents first; the trie must not change meanwhile."""
        waiting = [*self._root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def match(self, key: Key, *, limit: int | None = None) -> Match[K, S]:
        """Return how far `key` is in the trie, at most `limit` tokens. Changes nothing."""
        end = length(key) if limit is None else min(limit, length(key))
        node, at, path = self._root, 0, []
        while at < end:
            child = node.children.get(key[at * TOKEN_NBYTES : (at + 1) * TOKEN_NBYTES])
            if child is None:
                break
            node = child
            path.append(node)
            at += common(node.edge, key, at)
            if at < node.stop:
                break
        return Match(tuple(path), min(at, end))

    def touch(self, match: Match[K, S], *, used: int) -> None:
        """Note a request whose row was restored to `used` tokens of `match`, 0 for a miss.

        Called once a request, before the trie changes again: it is what advances time. Only nodes
        with used tokens count as used.

        Raises:
            TrieError: more was used than matched.
        """
        if not 0 <= used <= match.count:
            raise TrieError(f"{used} of {match.count} matched tokens cannot have been used")
        self._now += 1
        for node in match.path:
            if node.start < used:
                node.use(self._now, used)
            if node.stop == used:
                node.landed = Uses(node.landed.count + 1, self._now)
            if node in self._evictable:
                self._evictable.note(node)

    def insert(self, key: Key, snapshots: Mapping[K, S]) -> Node[K, S] | None:
        """Keep what a row left at the end of `key`; return the node that ends there.

        Takes `snapshots` over, whatever it returns, but not where it raises TrieError. A sliceable
        kind's has to reach back to where the trie's own end, or further (what is kept already
        stays, the new is closed). Where it does not, or a sliceable kind is missing, or there is
        nothing to keep at all, these tokens could never be restored: all is closed and None
        returned. So it goes with a row whose own beginning was evicted in the meantime.
        Where the key ends inside an edge and no whole-state snapshot asks for a node there, the
        node around it is returned. Several captures of a row are inserted shortest first.

        Raises:
            TrieError: the key is empty, or a snapshot is of a foreign kind or ends elsewhere.
        """
        end = length(key)
        self._check_fit(end, snapshots)
        match = self.match(key)
        if not self._keepable(match.count, end, snapshots):
            for snapshot in snapshots.values():
                snapshot.close()
            return None
        whole = {kind: s for kind, s in snapshots.items() if not kind.sliceable}
        cut = {kind: s for kind, s in snapshots.items() if kind.sliceable}
        at = match.path[-1] if match.path else self._root
        if match.count < at.stop and (match.count < end or whole):
            at = self._split(at, match.count)
        node = self._extend(at, key, cut)
        for kind, snapshot in whole.items():
            if kind in node.snapshots:
                snapshot.close()
            else:
                self._adopt(node, kind, snapshot)
                node.landed = Uses(1, self._now)
        self._review(node)
        for passed in (*match.path, at):
            stands = self._compact(passed)
            node = stands if passed is node else node
        return node

    def evict(self, to_nbytes: int) -> list[Evicted]:
        """Remove what is worth least until at most `to_nbytes` (0 or more) are owned; say what.

        Leaves go before what they hang from. Of an inner node only whole-state snapshots can go.
        """
        if self.nbytes <= to_nbytes:
            return []
        gone: list[Evicted] = []
        self._evictable.rank(self._now)
        while self.nbytes > max(to_nbytes, 0):
            node = self._evictable.least()
            gone.append(self._describe(node))
            if node.children:
                self._strip(node)
            else:
                self._unlink(node)
        return gone

    def find_doomed(self, nbytes: int) -> list[Node[K, S]]:
        """Return the nodes at which eviction for so many bytes would begin, the first one first."""
        doomed: list[Node[K, S]] = []
        for node in self._evictable.lowest(DOOMED_MAX):
            if nbytes <= 0:
                break
            doomed.append(node)
            if node.children:
                nbytes -= node.whole_nbytes
                continue
            alone = takewhile(lambda before: len(before.children) == 1, node.ancestors())
            nbytes -= node.nbytes + sum(before.nbytes for before in alone)
        return doomed

    def clear(self) -> None:
        """Close and forget everything."""
        for node in self.nodes():
            self._empty(node)
        self._evictable.clear()
        self._root = Node(None, Key(b""), self._now)
        self.nbytes = 0

    def _check_fit(self, end: int, snapshots: Mapping[K, S]) -> None:
        if not end:
            raise TrieError("the root keeps nothing")
        for kind, snapshot in snapshots.items():
            if kind not in self._sliceable and kind not in self._whole:
                raise TrieError(f"no layer is {kind}")
            if snapshot.stop != end:
                raise TrieError(f"a {kind} snapshot ends at {snapshot.stop}, its key at {end}")

    def _keepable(self, kept: int, end: int, snapshots: Mapping[K, S]) -> bool:
        """Return whether the part beyond `kept` tokens continues what is there."""
        return kept == end or (
            bool(snapshots)
            and all(kind in snapshots for kind in self._sliceable)
            and all(snapshots[kind].start <= kept for kind in self._sliceable)
        )

    def _extend(self, at: Node[K, S], key: Key, cut: Mapping[K, S]) -> Node[K, S]:
        """Hang what `key` has beyond `at` behind it; return the last node, `at` if nothing."""
        end = length(key)
        rest: dict[K, S] = {}
        for kind, snapshot in cut.items():
            before, after = (snapshot, None) if at.stop >= end else snapshot.split(at.stop)
            if before is not None:
                before.close()
            if after is not None:
                rest[kind] = after
        while at.stop < end:
            stop = min(end, (at.stop // self._edge_tokens + 1) * self._edge_tokens)
            child: Node[K, S] = Node(at, part(key, at.stop, stop), self._now)
            at.children[child.first] = child
            for kind in self._sliceable:
                piece, after = rest.pop(kind).split(stop)
                assert piece is not None, "a sliceable snapshot reaches over the edge"
                self._adopt(child, kind, piece)
                if after is not None:
                    rest[kind] = after
            self._review(at)
            at = child
        return at

    def _split(self, node: Node[K, S], at: int) -> Node[K, S]:
        """Cut an edge at `at`, inside it; return the new parent, which ends there."""
        assert node.start < at < node.stop, (node, at)
        front = node.cut_front(at, self._now)
        for kind in self._sliceable:
            before, after = self._release(node, kind).split(at)
            assert before is not None, "snapshots span their edge"
            assert after is not None, "snapshots span their edge"
            self._adopt(front, kind, before)
            self._adopt(node, kind, after)
        return front

    def _compact(self, node: Node[K, S]) -> Node[K, S]:
        """Make a node one with its only child if nothing keeps it apart; return what stands."""
        if node.parent is None or len(node.children) != 1 or self._has_state(node):
            return node
        (child,) = node.children.values()
        if node.start // self._edge_tokens != (child.stop - 1) // self._edge_tokens:
            return node
        pairs = [(node.snapshots[kind], child.snapshots[kind]) for kind in self._sliceable]
        if any(front.row != back.row for front, back in pairs):
            return node
        for kind in self._sliceable:
            merged = self._merge(self._release(node, kind), self._release(child, kind))
            self._adopt(child, kind, merged)
        child.take_front()
        self._review(child)
        return child

    def _unlink(self, node: Node[K, S]) -> None:
        """Take a leaf away, and what only led to it."""
        top = self._useless_without(node)
        self._empty(node)
        parent = top.parent
        assert parent is not None, "the root stays"
        del parent.children[top.first]
        top.parent = None
        self._review(parent)
        self._compact(parent)

    def _useless_without(self, node: Node[K, S]) -> Node[K, S]:
        """Return the highest node that keeps nothing but what `node` does, often itself."""
        for before in node.ancestors():
            if before is self._root or len(before.children) > 1 or before.snapshots:
                break
            node = before
        return node

    def _strip(self, node: Node[K, S]) -> None:
        """Take an inner node's whole-state snapshots."""
        for kind in self._whole:
            if kind in node.snapshots:
                self._release(node, kind).close()
        self._review(node)
        self._compact(node)

    def _empty(self, node: Node[K, S]) -> None:
        for kind in tuple(node.snapshots):
            self._release(node, kind).close()
        self._evictable.drop(node)

    def _adopt(self, node: Node[K, S], kind: K, snapshot: S) -> None:
        node.snapshots[kind] = snapshot
        self._grow(node, snapshot.nbytes)
        snapshot.on_materialise = partial(self._note_materialised, node)

    def _release(self, node: Node[K, S], kind: K) -> S:
        snapshot = node.snapshots.pop(kind)
        snapshot.on_materialise = None
        self._grow(node, -snapshot.nbytes)
        return snapshot

    def _grow(self, node: Node[K, S], nbytes: int) -> None:
        node.nbytes += nbytes
        self.nbytes += nbytes

    def _note_materialised(self, node: Node[K, S], nbytes: int) -> None:
        self._grow(node, nbytes)
        if node in self._evictable:
            self._evictable.note(node)

    def _has_state(self, node: Node[K, S]) -> bool:
        return any(kind in node.snapshots for kind in self._whole)

    def _review(self, node: Node[K, S]) -> None:
        """Note whether something of a node can go now."""
        if node is not self._root and (not node.children or self._has_state(node)):
            self._evictable.note(node)
        else:
            self._evictable.drop(node)

    def _worth(self, node: Node[K, S]) -> float:
        """Return what the part of an evictable node that could go is worth."""
        restorable = all(kind in node.snapshots for kind in self._whole)
        gain = 0
        if restorable:
            gain = node.stop - (self._point_before(node) if self._whole else node.start)
        uses = node.landed if node.children else node.passed
        nbytes = node.whole_nbytes if node.children else node.nbytes
        return self._value(Candidate(node, gain, nbytes, uses.count, self._now - uses.last))

    def _point_before(self, node: Node[K, S]) -> int:
        """Return the last length before a node's end at which a row could be restored."""
        for before in node.ancestors():
            if all(kind in before.snapshots for kind in self._whole):
                return before.stop
        return 0

    def _describe(self, node: Node[K, S]) -> Evicted:
        states_only = bool(node.children)
        nbytes = node.whole_nbytes if states_only else node.nbytes
        start = node.start if states_only else self._useless_without(node).start
        return Evicted(node.key(), start, nbytes, states_only)
