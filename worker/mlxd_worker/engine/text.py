"""Turn one stream's token ids into text that is safe to send.

Invariants
- Text is given out once, in order, and never taken back.
- No piece ends inside a character, nor inside what may become a stop string.
- A stream ends at the first character that completes any stop string; of those that end there the
  longest counts, and the text is cut before it. The result does not depend on how the text is split
  into tokens.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

AUTOMATA_KEPT_MAX: Final = 64
"""Automata kept for the next stream with the same stop strings."""


class TextDecoder(Protocol):
    """Incremental decoding of ids into whole characters, for one stream.

    Real: `mlxd_worker.text.tokenizer.Detokenizer`. The tests also use one that is a plain table.
    """

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that it completes, maybe none."""

    def finish(self) -> str:
        """Return what was held back; nothing is pushed afterwards."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be sent now. `stop` is the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces (Aho-Corasick).

    One instance a stream; any one thread. The state is the longest suffix of the text so far that
    may still grow into a stop string, and its depth is therefore exactly what has to be held back.
    While it is told not to end the stream, a stop string that is complete passes as text.
    """

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = _automaton(stops)
        self._held = ""
        self._state = 0

    def push(self, text: str, *, may_end: bool = True) -> Piece:
        """Take text; return what is in no stop string, or what precedes the one found."""
        if not text:
            return Piece("")
        automaton, state = self._automaton, self._state
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.matched[state]
            if stop is not None and may_end:
                self._held, self._state = "", 0
                return Piece(buffer[: end - len(stop)], stop)
        self._state = state
        cut = len(buffer) - automaton.depth[state]
        self._held = buffer[cut:]
        return Piece(buffer[:cut])

    def finish(self) -> str:
        """Return the text held back: the stream ended, so it is no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class TextStream:
    """One stream's text: ids in, pieces out. Owned by the engine thread.

    After a piece with a stop, or after `finish`, the stream is over and takes nothing more.
    """

    __slots__ = ("_decoder", "_matcher", "_over", "write")

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self.write = decoder.push
        """Takes one id and returns its text, without a call more: for streams without `stops`."""
        self._matcher = StopMatcher(stops) if stops else None
        self._over = False

    def push(self, token_id: int, *, may_end: bool = True) -> Piece:
        """Take one generated id; return the text that is safe to send.

        may_end: whether a stop string counts that ends in what this id adds to the text.
        """
        assert not self._over, "the stream is over"
        return self._filter(self._decoder.push(token_id), may_end=may_end)

    def finish(self) -> Piece:
        """Return what was held back; its last characters may complete a stop string, too."""
        assert not self._over, "the stream is over"
        self._over = True
        tail = self._filter(self._decoder.finish(), may_end=True)
        if tail.stop is not None or self._matcher is None:
            return tail
        return Piece(tail.text + self._matcher.finish())

    def _filter(self, text: str, *, may_end: bool) -> Piece:
        if self._matcher is None:
            return Piece(text)
        piece = self._matcher.push(text, may_end=may_end)
        self._over = self._over or piece.stop is not None
        return piece


@functools.lru_cache(maxsize=AUTOMATA_KEPT_MAX)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Return the automaton of `stops`: most streams of a client ask for the same ones."""
    return _Automaton(stops)


class _Automaton:
    """The trie of all stop strings with its failure links; node 0 is the root."""

    __slots__ = ("_edges", "_fail", "depth", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string ends every stream"
        self._edges: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.matched: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """Return the node of the longest known suffix after one more character."""
        while state and char not in self._edges[state]:
            state = self._fail[state]
        return self._edges[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._edges[node]:
                self._edges[node][char] = len(self._edges)
                self._edges.append({})
                self._fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.matched.append(None)
            node = self._edges[node][char]
        self.matched[node] = stop

    def _link(self) -> None:
        """Set failure links by depth; a node reports the longest stop string that ends there."""
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._edges[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                queue.append(child)
            if self.matched[node] is None:
                self.matched[node] = self.matched[self._fail[node]]
