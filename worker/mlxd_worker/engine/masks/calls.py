"""A grammar that sleeps until a call of a tool begins, and sleeps again behind it.

Invariants:
- While it is asleep a row is drawn as if it had no constraint, and steps may run ahead of it, but
  where the next token may complete an opening mark together with those before it.
- It wakes behind the last token of an opening mark. Nothing is looked for within reasoning.
- What the last token of the mark has beyond it must be how a call goes on; otherwise it stays
  asleep, as it does behind a token that has more beside a whole mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as filled

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.engine.masks.advance import Follower, Grammar, Place, Watched
from mlxd_worker.engine.masks.remote import RemoteMatcher


@dataclass(frozen=True, slots=True)
class Marks:
    """What is looked for in an answer, in bytes; reasoning has no marks where it is not known."""

    opening: bytes
    """What begins a call."""
    think: bytes = b""
    """What begins reasoning, at the answer's start."""
    think_end: bytes = b""
    reasoning: bool = False
    """Whether the prompt has begun reasoning already."""
    middle: bool = False
    """Whether the answer goes on within a text, so that no reasoning begins."""


@dataclass(frozen=True, slots=True)
class CallConstraint:
    """A grammar of what follows an opening mark, and how that is noticed. Immutable."""

    grammar: Grammar
    marks: Marks
    pieces: Sequence[bytes] = filled(repr=False)
    """What each id adds to the text, marks included."""
    ids: Mapping[bytes, int] = filled(repr=False)
    """An id of each text that a token of the grammar's own vocabulary is."""
    ends: bool = False
    """Whether the answer ends with its first call."""

    def start(self) -> CallMatcher:
        """Return a matcher at the beginning of the output, asleep."""
        return CallMatcher(self)


class _Watch:
    """Looks for the next opening mark in one answer, token by token."""

    __slots__ = ("_at_start", "_marks", "_reasoning", "tail")

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._reasoning = marks.reasoning
        self._at_start = bool(marks.think) and not marks.reasoning and not marks.middle
        self.tail = b""
        """The end of the text in which a mark may have begun."""

    @property
    def is_near(self) -> bool:
        """Whether an opening mark has begun."""
        ends = (self.tail[start:] for start in range(len(self.tail)))
        return not self._reasoning and any(map(self._marks.opening.startswith, ends))

    @property
    def state(self) -> Watched:
        """What it has noticed so far."""
        return Watched(self._at_start, self._reasoning, self.tail)

    @state.setter
    def state(self, state: Watched) -> None:
        self._at_start, self._reasoning, self.tail = state

    def push(self, piece: bytes) -> bytes | None:
        """Take what a token adds; return what it has behind an opening mark, None without one."""
        text, self.tail = self.tail + piece, b""
        if self._at_start:
            begun, opened = text.lstrip(), self._marks.think
            if opened.startswith(begun):
                self.tail = text
                return None
            self._at_start = False
            if begun.startswith(opened):
                self._reasoning, text = True, begun[len(opened) :]
        if self._reasoning:
            before, mark, text = text.partition(self._marks.think_end)
            if not mark:
                self.tail = _last(before, self._marks.think_end)
                return None
            self._reasoning = False
        before, mark, rest = text.partition(self._marks.opening)
        if not mark:
            self.tail = _last(before, self._marks.opening)
            return None
        # A token that is more than a whole mark was drawn without a grammar.
        return None if rest and len(self._marks.opening) + len(rest) <= len(piece) else rest


class CallMatcher:
    """Follows one row's output as `Matcher` does; asleep it allows everything.

    One owner at a time: the engine thread, or who advances it.
    """

    __slots__ = ("__weakref__", "_inner", "_rest", "_watch", "calls")

    def __init__(self, calls: CallConstraint) -> None:
        self.calls = calls
        self._watch = _Watch(calls.marks)
        self._inner: Follower | None = None
        self._rest: tuple[int, ...] = ()
        """Tokens for what the opening mark's last token has beyond it; they are followed first."""

    @property
    def is_awake(self) -> bool:
        """Whether a mask is in force."""
        return self._inner is not None

    @property
    def may_wake(self) -> bool:
        """Whether the next token may wake it together with those before it."""
        return self._watch.is_near

    @property
    def has_rest(self) -> bool:
        """Whether something is to be followed before there is a mask (`mask`)."""
        return bool(self._rest)

    @property
    def constraint(self) -> Grammar:
        """The grammar of a call."""
        return self.calls.grammar

    @property
    def is_over(self) -> bool:
        """Whether the output is complete: one call is all that there may be."""
        return self.calls.ends and self._inner is not None and self._inner.is_over

    @property
    def is_slow(self) -> bool:
        """As the grammar's own matcher."""
        return self._inner is not None and self._inner.is_slow

    def see(self, token_id: int) -> None:
        """Take a token that was drawn asleep; wake up behind an opening mark."""
        rest = self._watch.push(self.calls.pieces[token_id])
        if rest is None:
            return
        ids = self._ids_of(rest)
        if ids is None:
            return
        self._inner, self._rest = self.calls.grammar.start(), ids

    def mask(self) -> bytes:
        """Return the tokens allowed next, once the rest of the mark's token is followed.

        Asleep there is none. Raises as `Matcher.mask`.
        """
        rest, self._rest = self._rest, ()
        for token_id in rest:
            assert self._inner is not None, "a rest is of an opening mark"
            if not self._inner.try_accept(token_id):
                self._sleep()
                break
        return b"" if self._inner is None else self._inner.mask()

    def try_accept(self, token_id: int) -> bool:
        """Go on with a token; False if a grammar that is in force does not allow it.

        Raises as `Matcher.try_accept`.
        """
        if self._rest:
            self.mask()
        if self._inner is None:
            self.see(token_id)
            return True
        if not self._inner.try_accept(token_id):
            return False
        if self._inner.is_over and not self.calls.ends:
            self._sleep()
        return True

    def place(self) -> Place:
        """Return where it is, and what it has noticed of the text."""
        mask = b"" if self._inner is None else self._inner.place().mask
        return Place(mask, self.is_awake, self._watch.state)

    def move_to(self, place: Place) -> None:
        """Stand where the same row's is in the process that follows the output.

        The grammar is a `RemoteConstraint`, the place one of calls.
        """
        assert place.watched is not None, "a place of another constraint"
        self._watch.state = place.watched
        self._rest = ()
        if not place.awake:
            self._inner = None
            return
        inner = self._inner or self.calls.grammar.start()
        assert isinstance(inner, RemoteMatcher), "followed in this process"
        inner.move_to(place)
        self._inner = inner

    def leave(self) -> None:
        """As `Matcher.leave`."""
        if self._inner is not None:
            self._inner.leave()

    def too_slow(self, limit: str) -> InvalidRequest:
        """As `Matcher.too_slow`."""
        return (self._inner or self.calls.grammar.start()).too_slow(limit)

    def _sleep(self) -> None:
        self.leave()
        self._inner = None

    def _ids_of(self, text: bytes) -> tuple[int, ...] | None:
        """Return tokens that spell a text; None where the vocabulary has none."""
        if not text:
            return ()
        whole = self.calls.ids.get(text)
        if whole is not None:
            return (whole,)
        singles = [self.calls.ids.get(text[i : i + 1]) for i in range(len(text))]
        known = tuple(token_id for token_id in singles if token_id is not None)
        return known if len(known) == len(singles) else None


def _last(text: bytes, mark: bytes) -> bytes:
    """Return the end of a text in which a mark may have begun."""
    return text[-(len(mark) - 1) :] if len(mark) > 1 else b""
