"""What of the prefix cache is on disk: which blocks a prompt needs, which are worth writing.

Invariants:
- Blocks that were used twice are written, and, before the model goes, what is worth it; both where
  reading them back is quicker than computing them (`blocks.policy`). Between a use and its block's
  turn the snapshots may have been evicted: then nothing is written, until the next use.
- At most one block is cut and handed over at a time, and none while the threads have enough. Where
  a step's own cores copy it, it is a few arrays a step while rows run, so that no step is longer by
  a block; what memory lets go meanwhile is not written.
- A prompt's blocks are named once for each request that uses it; those that memory is about to let
  go, a few at a time (`doomed`), and only where writing the prompt would pay.
- A prompt is given the blocks that follow what it has in memory, up to a length at which every kind
  of layer can stand: kinds with a state stop at the ends of blocks for which one was written. No
  such length is within an image.
- A use in memory is a use of the same blocks on disk.
- Engine thread only; the threads are the tier's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlxd_shared.blocks.block_file import Block, BlockId, Part, Tensor
from mlxd_shared.blocks.chain import names_of
from mlxd_shared.blocks.listing import folder_name
from mlxd_shared.blocks.policy import (
    USES_MIN,
    Offer,
    choose_offer,
    is_worth_writing,
    patience_s,
    read_s,
)
from mlxd_shared.domain.figures import PrefixDisk as PrefixDiskFigures
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.base import Kind
from mlxd_worker.cache.disk.cutting import count_arrays, cut, tensors_of
from mlxd_worker.cache.disk.doomed import DoomedPrompts
from mlxd_worker.cache.disk.shapes import BlockShapes
from mlxd_worker.cache.disk.tier import BlockTier, Reading
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.kept.stacks import LayerState
from mlxd_worker.cache.prefix.images import whole_images
from mlxd_worker.cache.prefix.trie import PrefixTrie
from mlxd_worker.cache.prefix.trie_node import Key, Match, Node, part
from mlxd_worker.kernels.device import runs_cpu

WANTED_MAX: Final = 1 << 14
"""Blocks that wait for their turn to be cut; those beyond wait for their next use."""

COPIED_NBYTES_S: Final = 50 << 20
"""Of blocks, copied beside rows in a second of their steps, where a CPU computes both: half a MiB
in a step of 10 ms, which is less than a twentieth of it."""

PUT_NBYTES_S: Final = 100 << 20
"""Of blocks, put back into a row beside others in a second of their steps, where a CPU computes
both: 1 MiB in a step of 10 ms, a twentieth of it."""

Trie = PrefixTrie[Kind, Snapshot]

_log = get_logger("prefix disk")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A block to cut: the last of `key`'s blocks up to `depth`."""

    key: Key
    depth: int
    before: bytes


class PrefixDisk:
    """One model's blocks. One owner: the engine thread."""

    def __init__(self, tier: BlockTier, shapes: BlockShapes) -> None:
        """Keep blocks of these shapes by the threads of `tier`."""
        self.tier = tier
        self.shapes = shapes
        self.block_tokens = shapes.block_tokens
        self.token_s = 0.0
        """What computing a token of a prompt takes; 0 where none was."""
        self.copied_nbytes_s = COPIED_NBYTES_S if runs_cpu() else None
        """How much is copied beside rows, by their steps' time, one array a step at least; None:
        all of a block in one step."""
        self.put_nbytes_s = PUT_NBYTES_S if runs_cpu() else None
        """The same of what is put back into rows, one layer a step at least; None: a block each."""
        self.beside_rows = False
        """Whether others decode, so that a prompt is put back no faster than `put_nbytes_s`."""
        self._tended_s = tier.clock()
        self._step_s = 0.0
        """What the last step took."""
        self._entry_kinds = shapes.kinds(Part.ENTRIES)
        self._state_kinds = shapes.kinds(Part.STATE)
        self._block_nbytes = shapes.block_nbytes
        self._form_name, self._name_key = tier.store.form_name, tier.store.name_key
        self._wanted: dict[BlockId, _Wanted] = {}
        self._copied: list[Tensor] = []
        """Of the first of them."""
        self._doomed = DoomedPrompts(
            self._form_name, block_tokens=self.block_tokens, name_key=self._name_key
        )
        self._trie: Trie | None = None

    @property
    def needs_states(self) -> bool:
        """Whether a prompt can only stand where a state was written."""
        return bool(self._state_kinds)

    @property
    def put_nbytes_max(self) -> int | None:
        """How much of blocks a step may put into rows; None: one into each."""
        if self.put_nbytes_s is None or not self.beside_rows:
            return None
        return int(self.put_nbytes_s * self._step_s)

    @property
    def pending(self) -> bool:
        """Whether blocks wait to be named or cut."""
        return bool(self._wanted or self._doomed) and self.tier.writes

    def watch(self, trie: Trie) -> None:
        """Cut blocks from what `trie` keeps; once, before anything else."""
        self._trie = trie

    def find(self, key: Key, *, start: int, limit: int) -> Reading | None:
        """Begin to read what brings a prompt from `start` nearer to `limit`, if that pays."""
        names = self._names_of(part(key, 0, limit))
        size_of, first = self.tier.store.nbytes_of, start // self.block_tokens
        needed: list[BlockId] = []
        ways: dict[Offer, tuple[int, tuple[BlockId, ...]]] = {}
        nbytes = 0
        for depth, name in enumerate(names[first:], start=first):
            if self._entry_kinds:
                entries = BlockId(name, Part.ENTRIES)
                size = size_of(entries)
                if size is None:
                    break
                needed.append(entries)
                nbytes += size
            ends = [BlockId(name, Part.STATE)] if self._state_kinds else []
            sizes = [size_of(block) for block in ends]
            total = nbytes + sum(size or 0 for size in sizes)
            stop = (depth + 1) * self.block_tokens
            if None in sizes or whole_images(key, stop) != stop:
                continue
            offer = Offer(stop, total, len(needed) + len(ends))
            ways[offer] = (len(needed), tuple(ends))
        rates = self.tier.rates(self.token_s)
        if self.put_nbytes_s is not None and self.beside_rows:
            rates = replace(rates, read_nbytes_s=min(rates.read_nbytes_s, PUT_NBYTES_S))
        chosen = choose_offer(rates, start, tuple(ways))
        if chosen is None:
            return None
        count, states = ways[chosen]
        self._use(names[first : chosen.tokens // self.block_tokens])
        return self.tier.read(
            (*needed[:count], *states),
            nbytes=chosen.nbytes,
            patience_s=patience_s(rates, chosen, start=start),
        )

    def note_use(self, key: Key, match: Match[Kind, Snapshot], used: int) -> None:
        """Learn that a prompt was given its first `used` tokens out of memory, by `match`."""
        ends = [used // self.block_tokens * self.block_tokens]
        if self._state_kinds:
            ends = [node.stop for node in match.path if self._has_state(node) and node.stop <= used]
        if ends and ends[-1]:
            names = self._want(part(key, 0, ends[-1]), uses=USES_MIN)
            self._use(names)

    def note_doomed(self, nodes: Iterable[Node[Kind, Snapshot]]) -> None:
        """Learn what of memory is the next to make room: its next use can only be from disk."""
        for node in nodes:
            end: Node[Kind, Snapshot] | None = node
            if self._state_kinds:  # the last one up to this with all of a state
                line = (node, *node.ancestors())
                end = next((each for each in line if self._has_state(each)), None)
            if end is not None and self._pays(end.stop // self.block_tokens, leaving=True):
                self._doomed.note(end)

    def tend(self, *, idle: bool) -> None:
        """Copy a step's part of the block whose turn it is, where there is room; once a step.

        A block is handed over once it is copied as a whole.

        idle: nothing else is to be done: copy all of it, and wait for room, not for long.
        """
        self._step_s, self._tended_s = self.tier.clock() - self._tended_s, self.tier.clock()
        if not self.tier.writes:
            self._forget_wanted()
        named = self._doomed.advance()
        if named is not None:
            self._enlist(named.key, named.names)
        rate = None if idle else self.copied_nbytes_s
        nbytes_max = None if rate is None else int(rate * self._step_s)
        while self._wanted and self.tier.has_room():
            if self._copy_first(nbytes_max):
                return
        if idle and self._wanted:
            self.tier.wait()

    def save(self, *, timeout_s: float) -> None:
        """Write what is worth it of all that is kept, latest uses first, as far as time allows."""
        assert self._trie is not None, "the cache that this is for is there"
        until_s = self.tier.clock() + timeout_s
        nodes = self._ends(self._trie.nodes())
        for node in sorted(nodes, key=lambda node: -node.passed.last):
            if len(self._wanted) < WANTED_MAX:
                self._want(node.key(), leaving=True)
        with self.tier.hurry():
            while self.pending and self.tier.clock() < until_s:
                self.tend(idle=True)
            done = self.tier.flush(timeout_s=max(until_s - self.tier.clock(), 0.0))
        if self._wanted or not done:
            _log.warning("left blocks unwritten", count=len(self._wanted), timeout_s=timeout_s)
        self._forget_wanted()

    def figures(self, *, hit_tokens: int) -> PrefixDiskFigures:
        """Return what is there and has been done; `hit_tokens` of prompts came from here."""
        store, counts = self.tier.store, self.tier.store.counts
        return PrefixDiskFigures(
            form=folder_name(store.form_name),
            nbytes=store.nbytes,
            budget_nbytes=store.budget_nbytes,
            blocks=len(store),
            block_nbytes=self._block_nbytes,
            # Of an empty one nothing goes; the wire has numbers alone.
            least_worth=store.least_worth * store.about.block_s if len(store) else 0.0,
            written=counts.written,
            written_nbytes=counts.written_nbytes,
            read=counts.read,
            read_nbytes=counts.read_nbytes,
            evicted=counts.evicted,
            refused=sum(counts.refused.values()),
            hit_tokens=hit_tokens,
            encrypted=store.encrypted,
        )

    def again_s(self, tokens: int, *, kept_nbytes: int) -> float:
        """Return how long having `tokens` again takes once memory's `kept_nbytes` are gone.

        They are taken to be on disk as far as there are as many bytes.
        """
        store = self.tier.store
        share = min(store.nbytes / kept_nbytes, 1.0) if kept_nbytes else 0.0
        blocks = tokens / self.block_tokens
        nbytes = int(blocks * self._block_nbytes)
        reading_s = read_s(self.tier.rates(self.token_s), nbytes, files=math.ceil(blocks))
        computing_s = tokens * self.token_s
        return share * min(reading_s, computing_s) + (1 - share) * computing_s

    def close(self, *, timeout_s: float) -> None:
        """Save what time allows, and end the threads; the last call."""
        self.save(timeout_s=timeout_s)
        self.tier.close(timeout_s=timeout_s)

    def _ends(self, nodes: Iterable[Node[Kind, Snapshot]]) -> list[Node[Kind, Snapshot]]:
        """Return the nodes whose beginnings are worth a look: leaves, or where states are."""
        if self._state_kinds:
            return [node for node in nodes if self._has_state(node)]
        return [node for node in nodes if not node.children]

    def _has_state(self, node: Node[Kind, Snapshot]) -> bool:
        """Tell whether a node ends where a block does, with all that is needed there."""
        at_end = node.stop % self.block_tokens == 0
        return at_end and all(kind in node.snapshots for kind in self._state_kinds)

    def _want(self, key: Key, *, uses: int = 0, leaving: bool = False) -> tuple[bytes, ...]:
        """Have a prompt's whole blocks cut, where that pays; return their names."""
        names = self._names_of(key)
        if self._pays(len(names), uses=uses, leaving=leaving):
            self._enlist(key, names)
        return names

    def _pays(self, count: int, *, uses: int = 0, leaving: bool = False) -> bool:
        """Tell whether a prompt's first blocks, and a state at their end, are worth writing."""
        if not count or not self.tier.writes:
            return False
        nbytes, files = 0, 0
        if self._entry_kinds:
            # Of a block's positions there are as many entries at any depth.
            nbytes, files = count * self.shapes.nbytes(Part.ENTRIES, 0), count
        if self._state_kinds:
            nbytes += self.shapes.nbytes(Part.STATE, count - 1)
            files += 1
        return is_worth_writing(
            self.tier.rates(self.token_s),
            tokens=count * self.block_tokens,
            nbytes=nbytes,
            files=files,
            uses=uses,
            leaving=leaving,
        )

    def _enlist(self, key: Key, names: Sequence[bytes]) -> None:
        """Have blocks cut in their turn, and a prompt's state where its last block ends."""
        files = [(depth, Part.ENTRIES) for depth in range(len(names)) if self._entry_kinds]
        if self._state_kinds:
            files.append((len(names) - 1, Part.STATE))
        for depth, what in files:
            block = BlockId(names[depth], what)
            before = names[depth - 1] if depth else self._form_name
            is_there = block in self._wanted or self.tier.store.nbytes_of(block) is not None
            if not is_there and not self.tier.is_writing(block) and len(self._wanted) < WANTED_MAX:
                self._wanted[block] = _Wanted(key, depth, before)

    def _names_of(self, key: Key) -> tuple[bytes, ...]:
        return names_of(
            self._form_name, key, block_tokens=self.block_tokens, name_key=self._name_key
        )

    def _use(self, names: Iterable[bytes]) -> None:
        self.tier.store.use(BlockId(name, what) for name in names for what in Part)

    def _forget_wanted(self) -> None:
        self._wanted.clear()
        self._copied.clear()
        self._doomed.clear()

    def _copy_first(self, nbytes_max: int | None) -> bool:
        """Copy so much of the block whose turn it is, and hand it over once that is all of it.

        Return whether anything was copied: not where the block is not in memory, or not at rest.
        """
        block_id, wanted = next(iter(self._wanted.items()))
        states = self._cut(block_id, wanted)
        if states is None:
            del self._wanted[block_id]
            self._copied.clear()
            return False
        self._copied += tensors_of(states, done=len(self._copied), nbytes_max=nbytes_max)
        if len(self._copied) < count_arrays(states):
            return True
        del self._wanted[block_id]
        start = wanted.depth * self.block_tokens
        block = Block(
            self._form_name,
            wanted.before,
            bytes(part(wanted.key, start, start + self.block_tokens)),
            wanted.depth,
            block_id.part,
            tuple(self._copied),
            name_key=self._name_key,
        )
        self._copied.clear()
        self.tier.note_saving(self.block_tokens * self.token_s)
        self.tier.write(block, gently=nbytes_max is not None)
        return True

    def _cut(self, block: BlockId, wanted: _Wanted) -> Mapping[Kind, tuple[LayerState, ...]] | None:
        """Return a block's arrays as they are in memory, lazy; None: not there, or not at rest."""
        start = wanted.depth * self.block_tokens
        stop = start + self.block_tokens
        assert self._trie is not None, "the cache that this is for is there"
        match = self._trie.match(part(wanted.key, 0, stop))
        if match.count < stop:
            return None
        if block.part is Part.STATE:
            node = match.path[-1]
            if node.stop != stop or not self._has_state(node):
                return None
            return {kind: node.snapshots[kind].layers for kind in self._state_kinds}
        states: dict[Kind, tuple[LayerState, ...]] = {}
        for kind in self._entry_kinds:
            layers = cut(match.parts(kind), start, stop)
            if layers is None:
                return None
            states[kind] = layers
        return states
