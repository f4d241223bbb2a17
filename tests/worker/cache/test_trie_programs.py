"""The prefix trie against a naive reference, by random programs: a dict of all prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxd_worker.cache.prefix.eviction import Candidate, reuse_value
from mlxd_worker.cache.prefix.trie import Evicted, PrefixTrie
from mlxd_worker.cache.prefix.trie_node import Match, Node, key_of
from tests.support.effort import SAME_EACH_TIME, examples
from tests.worker.cache.trie_model import (
    Book,
    Kind,
    Snapshot,
    Tokens,
    check,
    mergeable,
    put,
    remove,
    tags,
    tokens_of,
)

STEPS_MIN = 200
EDGE_TOKENS = 8
MODELS = {
    "standard": (Kind.STANDARD,),
    "standard+quantized": (Kind.STANDARD, Kind.QUANTIZED),
    "hybrid": (Kind.STANDARD, Kind.RECURRENT),
    "all": (Kind.STANDARD, Kind.QUANTIZED, Kind.ROTATING, Kind.RECURRENT),
    "states-alone": (Kind.ROTATING, Kind.RECURRENT),
}
Do: TypeAlias = Literal["request", "keep", "evict", "copy-out", "remove"]


@dataclass(frozen=True, slots=True)
class Step:
    """One call, its numbers taken modulo what there is to choose from."""

    do: Do
    which: int
    cut: int
    tail: tuple[int, ...]
    twice: bool
    lazy: bool


STEPS = st.builds(
    Step,
    do=st.sampled_from(
        ("request", "request", "keep", "keep", "keep", "evict", "copy-out", "remove")
    ),
    which=st.integers(0, 1 << 16),
    cut=st.integers(0, 1 << 16),
    tail=st.lists(st.integers(0, 3), max_size=20).map(tuple),
    twice=st.sampled_from((False, False, False, True)),
    lazy=st.booleans(),
)
PROGRAMS = st.lists(STEPS, min_size=STEPS_MIN, max_size=STEPS_MIN + 40)


@dataclass(slots=True)
class Pair:
    """A trie and what it must hold: every prefix, and the states that stand at one."""

    kinds: tuple[Kind, ...]
    lazy: bool
    book: Book = field(default_factory=Book)
    prefixes: set[Tokens] = field(default_factory=set)
    states: set[tuple[Kind, Tokens]] = field(default_factory=set)
    past: list[Tokens] = field(default_factory=lambda: [()])
    now: int = 0
    trie: PrefixTrie[Kind, Snapshot] = field(init=False)

    def __post_init__(self) -> None:
        self.trie = PrefixTrie(
            self.kinds, self.book.merge, edge_tokens=EDGE_TOKENS, rerank_requests=0
        )

    def prompt(self, step: Step) -> Tokens:
        """Return some beginning of a former prompt, and something new."""
        base = self.past[step.which % len(self.past)]
        return base[: step.cut % (len(base) + 1)] + step.tail

    def run(self, step: Step) -> None:
        """Take one step on both sides and compare all there is."""
        match step.do:
            case "request":
                self.request(self.prompt(step), step)
            case "keep":
                self.keep(self.prompt(step), step)
            case "evict":
                self.evict_one()
                self.evict(self.trie.nbytes * (step.cut % 5) // 4)
            case "copy-out":
                self.copy_out(step)
            case "remove" if step.cut % 4 == 0:
                self.remove(step)
            case _:
                pass
        check(self.trie, self.book, self.kinds, EDGE_TOKENS)
        if not self.lazy:
            assert not mergeable(self.trie, EDGE_TOKENS)
        self.compare()

    def request(self, prompt: Tokens, step: Step) -> None:
        """Look a prompt up, see what would be restored, and touch exactly that."""
        limit = max(len(prompt) - 1, 0)
        match = self.trie.match(key_of(prompt), limit=limit)
        assert match.count == self.longest(prompt[:limit])
        self.check_restored(match, prompt)
        used = step.which % (match.count + 1)
        before = {id(node): (node.passed, node.landed) for node in self.trie.nodes()}
        self.trie.touch(match, used=used)
        self.now += 1
        for node in self.trie.nodes():
            passed, landed = before[id(node)]
            on_path = node in match.path
            assert (node.passed != passed) == (on_path and node.start < used)
            assert (node.landed != landed) == (on_path and node.stop == used)

    def check_restored(self, match: Match[Kind, Snapshot], prompt: Tokens) -> None:
        """What the path holds joins to the matched tokens' own contents."""
        for kind in self.kinds:
            parts = match.parts(kind)
            if kind.sliceable:
                held = tuple(tag for part in parts for tag in part.held)
                assert held[: match.count] == tags(kind, prompt[: match.count], 0)
            else:
                for state in parts:
                    if state.stop <= match.count:
                        assert state.held == tags(kind, prompt[: state.stop], 0)

    def keep(self, tokens: Tokens, step: Step) -> None:
        """Insert some captures of a row, shortest first; the last has all kinds."""
        if not tokens:
            return
        known = self.longest(tokens)
        start = min(step.which % (len(tokens) + 1), known + step.cut % 2)
        stops = {len(tokens)} | ({known} if step.twice and known > start else set())
        for stop in sorted(stops):
            self.keep_one(tokens[:stop], start, step, full=stop == len(tokens))
        self.past.append(tokens)

    def keep_one(self, tokens: Tokens, start: int, step: Step, *, full: bool) -> None:
        """Insert one capture; predict whether it can be kept."""
        kinds = tuple(kind for kind in self.kinds if full or kind.sliceable or step.cut % 3)
        if step.cut % 11 == 0:
            kinds = kinds[1:]
        known = self.longest(tokens)
        cut = [kind for kind in self.kinds if kind.sliceable]
        possible = known == len(tokens) or (
            bool(kinds) and set(cut) <= set(kinds) and (not cut or start <= known)
        )
        lazy = step.lazy and self.lazy
        node = put(self.trie, self.book, tokens, kinds, start=start, lazy=lazy)
        assert (node is not None) == possible
        if node is None:
            return
        assert node.start < len(tokens) <= node.stop
        self.prefixes |= {tokens[:i] for i in range(1, len(tokens) + 1)}
        self.states |= {(kind, tokens) for kind in kinds if not kind.sliceable}

    def worth(self, node: Node[Kind, Snapshot]) -> float:
        """Return what a node, or the states of an inner one, is worth, told from the outside."""
        whole = {kind for kind in self.kinds if not kind.sliceable}
        points = [n.stop for n in node.ancestors() if whole <= set(n.snapshots)]
        gain = node.stop - ((points or [0])[0] if whole else node.start)
        states_nbytes = sum(s.nbytes for s in node.snapshots.values() if not s.kind.sliceable)
        return reuse_value(
            Candidate(
                node,
                gain if whole <= set(node.snapshots) else 0,
                states_nbytes if node.children else node.nbytes,
                (node.landed if node.children else node.passed).count,
                self.now - (node.landed if node.children else node.passed).last,
            )
        )

    def evict_one(self) -> None:
        """Evict as little as possible: it has to be what is worth least."""
        worths = {
            key_of(tokens_of(node)): self.worth(node)
            for node in self.trie.nodes()
            if not node.children or any(not kind.sliceable for kind in node.snapshots)
        }
        gone = self.trie.evict(self.trie.nbytes - 1)
        for one in gone[:1]:
            assert worths[one.key] == min(worths.values())
        for one in gone:
            assert one.nbytes or not one.states_only, "nothing was taken"
            self.forget(one)

    def evict(self, to_nbytes: int) -> None:
        """Evict, and forget what the trie says it has evicted."""
        before_nbytes = self.trie.nbytes
        gone = self.trie.evict(to_nbytes)
        assert self.trie.nbytes == before_nbytes - sum(one.nbytes for one in gone)
        assert self.trie.nbytes <= to_nbytes
        assert not gone or self.trie.nbytes + gone[-1].nbytes > to_nbytes, "no more than needed"
        for one in gone:
            self.forget(one)

    def forget(self, one: Evicted) -> None:
        """Do to the reference what an eviction says."""
        tokens = tuple(memoryview(one.key).cast("I"))
        if one.states_only:
            self.states -= {(kind, tokens) for kind in self.kinds}
            return
        gone = {tokens[:i] for i in range(one.start + 1, len(tokens) + 1)}
        assert gone <= self.prefixes
        self.drop(gone)

    def remove(self, step: Step) -> None:
        """Remove a node and all behind it, and whatever only led there."""
        nodes = sorted(self.trie.nodes(), key=tokens_of)
        if nodes:
            node = nodes[step.which % len(nodes)]
            tokens = tokens_of(node)[: node.start + 1]
            remove(self.trie, node)
            self.drop({p for p in self.prefixes if p[: len(tokens)] == tokens})
            if not any(kind.sliceable for kind in self.kinds):
                self.drop(self.prefixes - self.in_trie())

    def drop(self, gone: set[Tokens]) -> None:
        """Forget prefixes and what stood at them."""
        self.prefixes -= gone
        self.states = {(kind, tokens) for kind, tokens in self.states if tokens not in gone}

    def copy_out(self, step: Step) -> None:
        """Let some lazy snapshots own what they name, as when their row goes on."""
        lazy = [s for node in self.trie.nodes() for s in node.snapshots.values() if s.lazy]
        for snapshot in lazy[step.cut % 3 :: 2]:
            snapshot.materialise()

    def longest(self, tokens: Tokens) -> int:
        """Return how much of `tokens` is kept, the slow way."""
        return max((i for i in range(len(tokens) + 1) if tokens[:i] in self.prefixes), default=0)

    def in_trie(self) -> set[Tokens]:
        """Return every prefix of which the trie knows the end."""
        prefixes: set[Tokens] = set()
        for node in self.trie.nodes():
            tokens = tokens_of(node)
            prefixes |= {tokens[:i] for i in range(node.start + 1, node.stop + 1)}
        return prefixes

    def compare(self) -> None:
        """Assert that both sides keep the same prefixes and states."""
        assert self.in_trie() == self.prefixes
        held = {(k, tokens_of(n)) for n in self.trie.nodes() for k in n.snapshots}
        assert {(k, tokens) for k, tokens in held if not k.sliceable} == self.states


@pytest.mark.parametrize("lazy", [False, True], ids=["owned", "some-lazy"])
@pytest.mark.parametrize("kinds", MODELS.values(), ids=MODELS)
@settings(
    max_examples=examples(6),
    derandomize=SAME_EACH_TIME,
    suppress_health_check=list(HealthCheck),
)
@given(program=PROGRAMS)
def test_any_program_keeps_exactly_what_a_dict_of_prefixes_would(
    kinds: tuple[Kind, ...], lazy: bool, program: Sequence[Step]
) -> None:
    """Matches are exact, contents are the tokens' own, bytes are counted, and nothing leaks."""
    pair = Pair(kinds, lazy)

    for step in program:
        pair.run(step)
    pair.trie.clear()

    assert (pair.trie.nbytes, pair.book.live, list(pair.trie.nodes())) == (0, 0, [])
