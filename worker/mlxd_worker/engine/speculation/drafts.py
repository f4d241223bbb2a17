"""What may come next, guessed from what a stream has said before: prompt look-up. Pure.

Invariants:
- A guess costs no model: the longest run of last tokens that occurred before is found, and what
  followed it then is proposed again.
- A guess depends on the tokens before it alone, never on a draw's noise: that is what lets an
  accepted token count as a draw (see `verify`).
- Pairs of tokens are chained to their former occurrences, as in the compressors of Lempel and Ziv.
  A token costs one dictionary entry, and a look-up at most `CANDIDATES_MAX` comparisons of at most
  `AGREED_MAX` tokens, however long the stream is.
- At most `HISTORY_TOKENS_MAX` tokens are remembered, and half of them are forgotten at once, with
  their part of the dictionary: nothing is ever built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

HISTORY_TOKENS_MAX: Final = 16_384
"""About 2 MB of a stream's own memory where no two pairs are the same."""

CANDIDATES_MAX: Final = 16
"""Former occurrences that a look-up compares, latest first."""

AGREED_MAX: Final = 16
"""Tokens back from the end that a look-up compares; more agreement tells nothing more."""

AGREED_MIN: Final = 2
"""Tokens that have to agree for a guess: what is chained are pairs."""

_NONE: Final = -1
_ID_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next, and how confident the drafter was."""

    tokens: tuple[int, ...]
    """At least one."""
    agreed: int = 0
    """How many tokens in a row were right, so to say, before the first of these."""

    def cut(self, depth: int) -> Guess:
        """Return the first `depth` tokens of it, at least one."""
        return self if depth >= len(self.tokens) else Guess(self.tokens[:depth], self.agreed)


class Drafter(Protocol):
    """Guesses for one stream. Real: prompt look-up; tests propose what they like."""

    def push(self, token_id: int) -> None:
        """Take the stream's next token."""

    def guess(self, depth_max: int) -> Guess | None:
        """Return at most `depth_max` tokens that may come next, or None; `depth_max` is not 0.

        The same tokens pushed give the same guess.
        """


MakeDrafter = Callable[[Sequence[int]], Drafter]
"""Takes a stream's prompt; returns its drafter."""


class PromptLookup:
    """Proposes what followed the longest run of the stream's last tokens that occurred before."""

    def __init__(
        self, prompt: Sequence[int], *, history_tokens_max: int = HISTORY_TOKENS_MAX
    ) -> None:
        """Begin with the prompt's last tokens; `history_tokens_max` is even."""
        assert history_tokens_max % 2 == 0, "forgotten half by half"
        assert history_tokens_max > 0, "nothing to look up in"
        self._half = history_tokens_max // 2
        self._tokens: list[int] = []
        self._links: list[int] = []
        """By token: the position before it at which the same pair of tokens ended, or _NONE."""
        self._base = 0
        """The position of the first token that is remembered."""
        self._last: dict[int, int] = {}
        """Where each pair ended last, among the newest tokens."""
        self._older: dict[int, int] = {}
        """The same, among the half of the tokens that is forgotten next."""
        for token_id in islice(prompt, max(len(prompt) - history_tokens_max, 0), None):
            self.push(token_id)

    @property
    def remembered(self) -> int:
        """How many tokens are looked up in."""
        return len(self._tokens)

    @property
    def entries(self) -> int:
        """How many pairs the dictionary has."""
        return len(self._last) + len(self._older)

    def push(self, token_id: int) -> None:
        """Take the stream's next token."""
        if len(self._tokens) in (self._half, 2 * self._half):
            self._turn()
        link = _NONE
        if self._tokens:
            pair = self._tokens[-1] << _ID_BITS | token_id
            link = self._last.get(pair, _NONE)
            if link == _NONE:
                link = self._older.get(pair, _NONE)
            self._last[pair] = self._base + len(self._tokens)
        self._tokens.append(token_id)
        self._links.append(link)

    def guess(self, depth_max: int) -> Guess | None:
        """Return what followed the longest run that ended as the stream does now, the latest one.

        A run that reaches into what it proposes goes on with that: "a b a b" is followed by
        "a b a b a b" however deep.
        """
        position, agreed = self._longest()
        if agreed == 0:
            return None
        period = len(self._tokens) - position - 1
        follows = self._tokens[position + 1 : position + 1 + depth_max]
        while len(follows) < depth_max:
            follows += follows[len(follows) - period :][: depth_max - len(follows)]
        return Guess(tuple(follows), agreed)

    def _longest(self) -> tuple[int, int]:
        """Return where, in `_tokens`, the best run before ended, and how long it is; 0: none."""
        tokens, links, base = self._tokens, self._links, self._base
        end = len(tokens) - 1
        best, longest = _NONE, 0
        candidate = links[end] - base if tokens else _NONE
        for _ in range(CANDIDATES_MAX):
            if candidate < 1:  # the pair's first token has to be remembered, too
                break
            agreed, most = AGREED_MIN, min(AGREED_MAX, candidate + 1)
            while agreed < most and tokens[candidate - agreed] == tokens[end - agreed]:
                agreed += 1
            if agreed > longest:
                best, longest = candidate, agreed
            if longest == AGREED_MAX:
                break
            candidate = links[candidate] - base
        return best, longest

    def _turn(self) -> None:
        """Begin a new half, and forget the one before the last."""
        if len(self._tokens) > self._half:
            del self._tokens[: self._half]
            del self._links[: self._half]
            self._base += self._half
        self._older, self._last = self._last, {}
