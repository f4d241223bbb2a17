"""The prefix cache: states of former prompts and answers, for prompts with the same beginning.

Invariants:
- One trie for all rows of a worker. A row that begins gets one copy of what it shares; what it
  computes itself is kept as lazy snapshots, which cost nothing while it runs and which others may
  read, and is copied out once, when it leaves.
- At least one token of a prompt is always left to evaluate.
- Room is made before bytes are spent: what a capture or a leaving row will take is evicted first,
  and what does not fit beside what it goes on from, and beside what running rows captured, is never
  copied. A budget of 0 keeps nothing.
- Only what was put back is touched.
- Where blocks are kept on disk (`cache.disk`), a row whose prompt goes on there waits for them, and
  its captures are planned when it has them.
- What a row's layers hold may be kept at any moment between two passes, whatever ended the row;
  the caller says where it may not (logits that are no numbers).
- Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.disk.arrivals import Arrivals
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.kept.points import (
    PROMPT_POINTS_MAX,
    ROLLING_KEPT,
    next_rolling,
    prompt_points,
)
from mlxd_worker.cache.kept.snapshot import Snapshot
from mlxd_worker.cache.prefix.evicted import EvictedRuns
from mlxd_worker.cache.prefix.images import match_whole_images, points_beside_images
from mlxd_worker.cache.prefix.lookup import (
    Lookup,
    PrefixCounts,
    Target,
    best_target,
    worth_putting_back,
)
from mlxd_worker.cache.prefix.tenants import Tenant
from mlxd_worker.cache.prefix.trie import PrefixTrie
from mlxd_worker.cache.prefix.trie_node import Key, Match, key_of, length, part
from mlxd_worker.cache.rows import RowCaches

SHORT_FRACTION = 0.5
"""Of the budget: where more is kept, what would go next is written to disk while it is there,"""
DOOMED_FRACTION = 0.25
"""as much as makes this part of the budget."""


class PrefixCache:
    """Looks prompts up and keeps what rows compute. One owner: the engine thread."""

    def __init__(
        self,
        caches: RowCaches,
        *,
        budget_nbytes: int,
        counts: PrefixCounts | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        """Keep snapshots of the rows of `caches`, at most `budget_nbytes`; tell `counts`.

        disk: where blocks of what is kept outlive it, if anywhere.
        """
        self.counts = counts or PrefixCounts()
        self.budget_nbytes = budget_nbytes
        self.token_s = 0.0
        """What computing a token of a prompt takes; 0 where none was."""
        self.version = 0
        """Changes whenever `count_known` may have grown."""
        self.waiting: set[RowId] = set()
        """The rows of whose prompts more is on its way from the disk."""
        self._caches = caches
        self._contents = caches.contents
        self._tenants: dict[RowId, Tenant] = {}
        self._evicted = EvictedRuns()
        self._layers = caches.contents.layers
        self._trie: PrefixTrie[Kind, Snapshot] = PrefixTrie(
            tuple(self._layers), caches.contents.book.merge
        )
        self.disk = disk
        """What writes and reads blocks of it, if anything does."""
        if disk is not None:
            disk.watch(self._trie)
        self._whole = tuple(kind for kind in self._layers if not kind.sliceable)
        self.captures = bool(self._whole)
        """Whether states are captured while rows go on: else `advance` has nothing to do."""
        self._sliceable = tuple(kind for kind in self._layers if kind.sliceable)
        smallest, largest = caches.table.classes[0], caches.table.classes[-1]
        self._token_nbytes = {
            kind: -(-self._slot_nbytes((kind,), smallest) // smallest) for kind in self._sliceable
        }
        self.state_nbytes = self._slot_nbytes(self._whole, largest)
        """The most bytes that one capture takes at once; 0 where all layers can be cut."""
        self._points_max = PROMPT_POINTS_MAX
        if self.state_nbytes:
            self._points_max = min(PROMPT_POINTS_MAX, budget_nbytes // self.state_nbytes)

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return bool(self._layers) and self.budget_nbytes > 0 and self._points_max > 0

    @property
    def nbytes(self) -> int:
        """The bytes that snapshots own, those of running rows included."""
        return self._trie.nbytes + self._captured_nbytes()

    @property
    def reload_s(self) -> float:
        """Seconds that the next prompt would compute or read longer, had all been forgotten."""
        tokens = self.counts.hit_tokens // max(self.counts.lookups.total(), 1)  # of one, on average
        if not self._trie.nbytes or self.disk is None:
            return tokens * self.token_s if self._trie.nbytes else 0.0
        return self.disk.again_s(tokens, kept_nbytes=self._trie.nbytes)

    def count_known(self, prompt: Sequence[int], *, most: int | None = None) -> int:
        """Return how many of a prompt's tokens `begin` would put back now; nothing changes."""
        if not self.enabled:
            return 0
        limit = len(prompt) - 1 if most is None else most
        match = match_whole_images(self._trie, key_of(prompt), limit=limit)
        return worth_putting_back(self._target(match).offset, in_place=self._caches.in_place)

    def begin(self, row: RowId, prompt: Sequence[int], *, most: int | None = None) -> Lookup:
        """Bring a row that has just joined as far into its prompt as former ones allow.

        The row then stands at `Lookup.cached`, which is below the prompt's length, and at most at
        `most`. Where it is among `waiting` afterwards, more is on its way: see `receive`.
        """
        total = len(prompt)
        limit = total - 1 if most is None else most
        if not self.enabled:
            return Lookup(total, cached=0, matched=0, reason=CacheReason.NONE)
        key = key_of(prompt)
        match = match_whole_images(self._trie, key, limit=limit)
        target = self._target(match)
        cached = worth_putting_back(target.offset, in_place=self._caches.in_place)
        if cached:
            restored = self._contents.restore(row, target.parts, cached)
            assert restored, "the target was chosen so that every kind can follow"
        reason = self._reason(key, match, target.offset)
        self._trie.touch(match, used=cached)
        lookup = Lookup(total, cached=cached, matched=match.count, reason=reason)
        tenant = self._tenants[row] = Tenant(prompt, lookup)
        tenant.arrivals = self._begin_reading(key, match, cached, limit)
        if tenant.arrivals is None:
            self._go_on(row, tenant)
        else:
            self.waiting.add(row)
        return lookup

    def receive(self, row: RowId, *, nbytes_max: int | None = None) -> int:
        """Put as much of the next block for a row of `waiting` as may be; return how many bytes.

        nbytes_max: so much, or one layer's at least; None: all of it.
        """
        tenant = self._tenants[row]
        assert tenant.arrivals is not None, "the row waits"
        put_nbytes = tenant.arrivals.put_back(row, nbytes_max=nbytes_max)
        tenant.lookup = tenant.lookup.read_up_to(self._contents.offset(row))
        return put_nbytes

    def end_waiting(self, row: RowId) -> Lookup | None:
        """Return what a row of `waiting` has, once no more comes; None where more may come."""
        tenant = self._tenants[row]
        if tenant.arrivals is None or not tenant.arrivals.is_over:
            return None
        self._stop_waiting(row, tenant)
        self._go_on(row, tenant)
        return tenant.lookup

    def advance(self, row: RowId) -> None:
        """Capture what is due, after a pass of the row has been evaluated."""
        tenant = self._tenants.get(row)
        if tenant is None or not tenant.points or self._contents.offset(row) < tenant.points[0]:
            return
        if self._make_room_for_state(row, tenant):
            self._collect(row, tenant)
        else:
            self._contents.unschedule(row)
            del tenant.points[0]
        if tenant.published:
            tenant.keep_last(ROLLING_KEPT)
        self._schedule(row, tenant)

    def publish(self, row: RowId) -> None:
        """Let other rows have the prompt of a row that has evaluated it; idempotent."""
        tenant = self._tenants.get(row)
        if tenant is None or tenant.published:
            return
        self._attach(row, tenant, key_of(tenant.prompt[:-1]))
        tenant.keep_last(0)
        tenant.published = True
        self._schedule(row, tenant)

    def leave(self, row: RowId, generated: Sequence[int], *, sound: bool = True) -> None:
        """Free the row's place, keeping what it holds of its prompt and what it `generated`.

        Not `sound`: nothing more than was published is kept.
        """
        tenant = self._tenants.get(row)
        if tenant is not None:
            self._stop_waiting(row, tenant)
            self._collect(row, tenant)
            kept = self._contents.offset(row) if sound else 0
            if kept:
                key = key_of((*tenant.prompt, *generated)[:kept])
                self._capture_end(row, tenant, key)
                self._attach(row, tenant, key)
            tenant.keep_last(0)
            del self._tenants[row]
            self._make_room(self._owed_nbytes(row))
        # Nobody has seen whether what a row holds that has drawn nothing are numbers.
        self._caches.leave(row, sound=sound and bool(generated))
        self._make_room(0)
        if self.disk is not None and self.nbytes > SHORT_FRACTION * self.budget_nbytes:
            self.disk.note_doomed(self._trie.find_doomed(int(DOOMED_FRACTION * self.budget_nbytes)))

    def shrink(self, to_nbytes: int) -> None:
        """Evict until at most `to_nbytes` are owned; what running rows captured stays."""
        self._evict(to_nbytes - self._captured_nbytes())

    def clear(self) -> None:
        """Forget everything but what running rows captured."""
        self._trie.clear()

    def _begin_reading(
        self, key: Key, match: Match[Kind, Snapshot], cached: int, limit: int
    ) -> Arrivals | None:
        """Have the disk read on from where memory ends, if that is worth the wait."""
        if self.disk is None:
            return None
        self.disk.note_use(key, match, cached)
        reading = self.disk.find(key, start=cached, limit=limit)
        return None if reading is None else Arrivals(self.disk, reading, self._contents)

    def _stop_waiting(self, row: RowId, tenant: Tenant) -> None:
        """Have no more blocks put into a row, if any were to be."""
        if tenant.arrivals is not None:
            tenant.arrivals.close()
            tenant.arrivals = None
        self.waiting.discard(row)

    def _go_on(self, row: RowId, tenant: Tenant) -> None:
        """Count what became of a prompt, and plan the captures of what is left of it."""
        lookup = tenant.lookup
        self.counts.lookups[lookup.hit, lookup.reason] += 1
        self.counts.hit_tokens += lookup.cached
        self.counts.disk_tokens += lookup.from_disk
        if self._whole:
            points = prompt_points(
                lookup.cached,
                lookup.total - 1,
                branch=lookup.matched if lookup.cached < lookup.matched else None,
                points_max=self._points_max,
                block_tokens=None if self.disk is None else self.disk.block_tokens,
            )
            key, most = key_of(tenant.prompt), self._points_max
            tenant.points += points_beside_images(key, points, lookup.cached, most)
        self._schedule(row, tenant)

    def _target(self, match: Match[Kind, Snapshot]) -> Target[Snapshot]:
        path = [node.snapshots for node in match.path]
        return best_target(path, match.count, kinds=tuple(self._layers), rewinds=self._rewinds)

    def _slot_nbytes(self, kinds: Iterable[Kind], capacity: int) -> int:
        layers = (layer for kind in kinds for layer in self._layers[kind])
        return sum(layer.slot_nbytes(capacity) for layer in layers)

    def _rewinds(self, kind: Kind, offset: int, target: int) -> bool:
        return all(layer.rewinds(offset, target) for layer in self._layers[kind])

    def _reason(self, key: Key, match: Match[Kind, Snapshot], cached: int) -> CacheReason:
        if cached == length(key) - 1:
            return CacheReason.NONE
        if self._evicted.match(key) > match.count or self._evicted.had_state(key, beyond=cached):
            return CacheReason.EVICTED
        if cached < match.count:
            return CacheReason.NON_TRIMMABLE_DIVERGENCE
        if not match.path or (match.path[-1].stop == match.count and not match.path[-1].children):
            return CacheReason.NONE
        return CacheReason.DIVERGED

    def _captured_nbytes(self, *, but: Tenant | None = None) -> int:
        """Return what running rows have captured that is not in the trie, `but` one's."""
        if not self._whole:
            return 0  # rows capture states alone
        return sum(tenant.nbytes for tenant in self._tenants.values() if tenant is not but)

    def _make_room(self, nbytes: int) -> None:
        """Evict so that `nbytes` more are within the budget, as far as eviction can."""
        excess_nbytes = self.nbytes + nbytes - self.budget_nbytes
        if excess_nbytes > 0:
            self._evict(self._trie.nbytes - excess_nbytes)

    def _make_room_for_state(self, row: RowId, tenant: Tenant) -> bool:
        """Make room for one more capture, at last of the row's own; return whether there is.

        There is none for one that could not stay: nothing is evicted for it.
        """
        before_nbytes = self._contents.offset(row) * sum(self._token_nbytes.values())
        least_nbytes = before_nbytes + self.state_nbytes + self._captured_nbytes(but=tenant)
        if least_nbytes > self.budget_nbytes:
            return False
        self._make_room(self.state_nbytes)
        while self.nbytes + self.state_nbytes > self.budget_nbytes:
            tenant.keep_last(len(tenant.states) - 1)
        return True

    def _evict(self, to_nbytes: int) -> None:
        for gone in self._trie.evict(max(to_nbytes, 0)):
            self._evicted.remember(gone.key, states_only=gone.states_only)
            self.counts.evictions += 1
            self.counts.evicted_nbytes += gone.nbytes

    def _owed_nbytes(self, row: RowId) -> int:
        """Return what the row's lazy snapshots will own once it has left."""
        owned = self._contents.book.lazy_of(row)
        return sum((lazy.stop - lazy.start) * self._token_nbytes[lazy.kind] for lazy in owned)

    def _schedule(self, row: RowId, tenant: Tenant) -> None:
        """Ask for the row's next capture; once the prompt is published, for the grid's next."""
        if not self._whole:
            return
        if tenant.published and self._points_max > ROLLING_KEPT:
            tenant.points = [next_rolling(self._contents.offset(row))]
        if tenant.points:
            self._contents.schedule(row, tenant.points[:1])

    def _collect(self, row: RowId, tenant: Tenant) -> None:
        """Take the row's capture, if it has come so far; states are kept, the rest is closed."""
        for captured in self._contents.take(row):
            if captured is None:
                continue
            for kind in self._sliceable:
                captured[kind].close()
            tenant.states[tenant.points.pop(0)] = {kind: captured[kind] for kind in self._whole}

    def _capture_end(self, row: RowId, tenant: Tenant, key: Key) -> None:
        """Keep the state at which the row ends, unless it is there already."""
        offset = length(key)
        if not self._whole or offset in tenant.states or self._holds_state(key):
            return
        if not self._make_room_for_state(row, tenant):
            return
        states = {kind: self._contents.snapshot(row, kind, 0) for kind in self._whole}
        tenant.states[offset] = {k: state for k, state in states.items() if state is not None}

    def _holds_state(self, key: Key) -> bool:
        match = self._trie.match(key)
        if not match.path or not match.path[-1].stop == match.count == length(key):
            return False
        return all(kind in match.path[-1].snapshots for kind in self._whole)

    def _attach(self, row: RowId, tenant: Tenant, key: Key) -> None:
        """Put the row's tokens `key`, and the states captured within them, into the trie."""
        self.version += 1
        for end in self._affordable(row, tenant, key):
            kept = part(key, 0, end)
            start = min(self._trie.match(kept).count, end - 1)
            pieces = {kind: self._lazy(row, kind, start, end) for kind in self._sliceable}
            self._trie.insert(kept, {**pieces, **tenant.states.pop(end, {})})

    def _affordable(self, row: RowId, tenant: Tenant, key: Key) -> list[int]:
        """Return the ends, ascending, of what may be kept of `key` within the whole budget."""
        end = length(key)
        match = self._trie.match(key)
        known = match.count
        each_nbytes = sum(self._token_nbytes.values())
        # What it goes on from has to stay for it, and nobody can evict what running rows captured.
        captured_nbytes = self._captured_nbytes(but=tenant)
        spoken_for_nbytes = self._owed_nbytes(row) + match.cut_nbytes + captured_nbytes
        left_nbytes = self.budget_nbytes - spoken_for_nbytes
        if not self._whole:
            end = min(end, known + max(left_nbytes, 0) // each_nbytes)
            return [end] if end > known else []
        ends = []
        for point in sorted(point for point in tenant.states if point <= end):
            left_nbytes -= sum(state.nbytes for state in tenant.states[point].values())
            if left_nbytes < max(point - known, 0) * each_nbytes:
                break
            ends.append(point)
        return ends

    def _lazy(self, row: RowId, kind: Kind, start: int, end: int) -> Snapshot:
        snapshot = self._contents.snapshot(row, kind, start)
        assert snapshot is not None, "the row holds more than is asked for"
        kept, beyond = snapshot.split(end)
        if beyond is not None:
            beyond.close()
        assert kept is not None, "the end is beyond the start"
        return kept
