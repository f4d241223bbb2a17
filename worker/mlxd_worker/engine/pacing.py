"""How many prompt tokens a step may evaluate, so that rows that decode are not kept waiting.

Invariants:
- Pure: all times come from the caller, on one clock. Equal calls give equal answers.
- While no row decodes, a step has one whole pass: a chunk, or where passes may be larger as many
  tokens as were measured to be read within the target. While one does, it has as many tokens as
  bring what waits to its end in `BACKLOG_STEPS`, but no more than fit between a decode step and the
  target, by what both were measured to take; `CRUMB_TOKENS` more where that ends a prompt. So a
  single prompt goes by in small pieces, without notice, and a crowd of them at full speed.
- Prefill always advances: a step may have `CHUNK_FLOOR_TOKENS`, unless decoding is measured in it,
  and prefill may take as long as decoding does, whatever the target. With less, where steps are
  long, prompts that come as fast as streams end wait in a queue that only grows. Where tokens come
  together or not at all (`fit`), a step that has none yet has all of them.
- What nobody waits for is learnt from how much longer steps get (decision 0110). For that decoding
  has to be known by itself: prompts that never cease leave it two steps of 26.
- One step never evaluates more than one whole pass, of however many prompts: so long at most is a
  cancel, a deadline or a new stream waited with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CHUNK_FLOOR_TOKENS: Final = 32
"""So many prompt tokens a step may always evaluate."""

CRUMB_TOKENS: Final = 32
"""Where no more than this, and no more than half of what a pass has, would be left of a prompt, the
pass takes it too: another one for so few would read all weights again."""

PIECE_MIN_S: Final = 0.02
"""A step may always spend so long on prompts, if the target allows."""

GENTLE_TOKENS_MAX: Final = 192
"""Where more prompt tokens wait, they never go by in the smallest pieces."""

BACKLOG_STEPS: Final = 6
"""In so many steps all that waits is to be evaluated, where the target allows."""

FORGOTTEN: Final = 1e-9
"""The weight of a measurement that the next one is to take the place of."""

REMEMBERED: Final = 0.8
"""What a step's measurement leaves of those before it."""

BEHIND_STEPS_MAX: Final = 8
"""After so many steps on end with prompts that nobody waited for, what they took is learnt."""

STALE_STEPS: Final = 24
"""After so many, decoding is measured anew: else all that it grows by would count as prompts'."""

BARE_STEPS: Final = 2
"""Steps without prompts that this takes: a device may have come to the last ones a step later."""

OUTLIER: Final = 4.0
"""A measurement counts as at most this multiple of the expectation."""


@dataclass(slots=True)
class Rate:
    """Seconds a unit of work, by measurements of which older ones count less.

    Each counts by its work. The cost of starting counts with the work it was spent on, so an
    estimate holds for pieces of about the size that is measured.
    """

    work: float = 0.0
    seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Take one measurement."""
        if self.seconds > 0.0:
            seconds = min(seconds, OUTLIER * work * self.per_unit_s)
        self.work = REMEMBERED * self.work + work
        self.seconds = REMEMBERED * self.seconds + seconds

    @property
    def per_unit_s(self) -> float:
        """The estimate; 0 where nothing was measured."""
        return self.seconds / self.work if self.work > 0.0 else 0.0


@dataclass(slots=True)
class _Behind:
    """Steps on end with prompts that nobody waits for, and the one behind them."""

    now: int = 0
    """Prompt tokens of this step."""
    before: bool = False
    """Whether the last step had any."""
    tokens: int = 0
    """Those of the steps before of which nothing has been learnt yet."""
    seconds: float = 0.0
    """By how much these took longer than decoding."""
    steps: int = 0
    since_bare: int = 0
    """Steps since decoding was measured."""
    bare_steps: int = 0
    """Steps that are to have no prompts, so that it is."""

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step; a device may come to its prompts with the next one."""
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1

    def clear(self) -> None:
        """Begin anew: this has been learnt."""
        self.tokens = self.steps = 0
        self.seconds = 0.0


class Pacer:
    """Learns what prefill and decoding take, and gives each step its prompt tokens."""

    def __init__(
        self, *, target_s: float, chunk_tokens: int, pass_tokens: int = 0, few_widths: bool = False
    ) -> None:
        """Begin without knowledge.

        target_s: between two tokens of a row. chunk_tokens: what a pass may always have.
        pass_tokens: what it may have at most where the device is fast, if that is more. few_widths:
        the chunks of long prompts are of few sizes, so that few shapes are in use.
        """
        assert target_s > 0.0
        assert chunk_tokens > 0
        self._target_s = target_s
        self._chunk_tokens = chunk_tokens
        self._pass_tokens = max(pass_tokens, chunk_tokens)
        self._widths = chunk_widths(self._pass_tokens) if few_widths else ()
        self._whole_tokens = chunk_tokens
        """This step's most."""
        self._prefill = Rate()
        self._decode = Rate()
        self._left_tokens = 0
        self._begun_tokens = 0
        """What this step had at its beginning, by its time as well."""
        self._unread_tokens = 0
        """Given out in this step, and not evaluated yet."""
        self._until_s: float | None = None
        self._gentle = False
        self._behind = _Behind()

    @property
    def chunk_tokens(self) -> int:
        """A whole chunk: what a step may always have."""
        return self._chunk_tokens

    @property
    def gentle(self) -> bool:
        """Whether rows decode in this step and little waits: so that it goes by in small pieces."""
        return self._gentle

    @property
    def prefill_token_s(self) -> float:
        """What a prompt token is expected to take; 0 where nothing is known."""
        return self._prefill.per_unit_s

    @property
    def decode_step_s(self) -> float:
        """What a decode step is expected to take; 0 where nothing is known."""
        return self._decode.per_unit_s

    def begin_step(self, now_s: float, *, decoding: bool, waiting_tokens: int) -> None:
        """Begin a step, in which rows decode or none does; so many prompt tokens wait."""
        self._whole_tokens = self._left_tokens = self._whole_pass()
        self._unread_tokens = 0
        self._until_s = None
        self._gentle = False
        if decoding and self._behind.bare_steps:
            self._behind.bare_steps -= 1
            self._whole_tokens = self._left_tokens = 0
        elif decoding:
            decode_s = self.decode_step_s
            most_s = max(self._target_s - decode_s, decode_s)
            wanted_s = waiting_tokens * self.prefill_token_s / BACKLOG_STEPS
            piece_s = max(decode_s, PIECE_MIN_S)
            known = self._prefill.work > 0.0
            self._gentle = known and wanted_s <= piece_s and waiting_tokens <= GENTLE_TOKENS_MAX
            self._until_s = now_s + min(max(wanted_s, piece_s), most_s)
        self._begun_tokens = min(self._left_tokens, self._fitting(now_s))

    def over(self, now_s: float) -> bool:
        """Whether there is no time left for prompts, once what was given out has been read."""
        read_s = now_s + self._unread_tokens * self.prefill_token_s
        return self._until_s is not None and read_s >= self._until_s

    def chunk(self, wanted: int, now_s: float, *, fit: Callable[[int], int] = int) -> int:
        """Return how many of a prompt's `wanted` tokens come next in this step; 0 ends its prefill.

        What is returned is taken as given out, and to be read in one pass with all that was given
        out before it; `learn_prefill` says that it was. fit: how many can be read of so many: as
        many or fewer, or where none can the fewest that can be, which only an untouched step has.
        """
        assert wanted > 0
        if not self._left_tokens:
            return 0
        untouched = self._left_tokens == self._whole_tokens
        tokens = min(wanted, self._left_tokens, self._fitting(now_s))
        if tokens < min(wanted, CHUNK_FLOOR_TOKENS):
            if not untouched:
                return 0
            tokens = min(wanted, CHUNK_FLOOR_TOKENS, self._chunk_tokens)
        crumb = min(CRUMB_TOKENS, tokens // 2)
        if not self._widths and wanted - tokens <= crumb and wanted <= self._left_tokens:
            tokens = wanted
        if self._widths and tokens < wanted:
            tokens = max((width for width in self._widths if width <= tokens), default=tokens)
        fitting = fit(tokens)
        if fitting > tokens and not untouched:
            return 0
        tokens = fitting
        self._left_tokens -= tokens
        self._unread_tokens += tokens
        return tokens

    def leaves_a_piece(self, wanted: int, now_s: float) -> bool:
        """Tell whether a prompt of which a chunk or more is wanted would have less of this step.

        Not of what nobody has had any of yet, nor where a step began with less than two chunks:
        else such a prompt might wait for long.
        """
        if self._whole_tokens == self._left_tokens or self._begun_tokens < 2 * self._chunk_tokens:
            return False
        left = min(self._left_tokens, self._fitting(now_s))
        return CHUNK_FLOOR_TOKENS <= left < self._chunk_tokens <= wanted

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Learn what one pass over `tokens` prompt tokens took, those given out last or others."""
        self._unread_tokens = max(self._unread_tokens - tokens, 0)
        self._prefill.add(tokens, max(seconds, 0.0))

    def note_behind(self, tokens: int) -> None:
        """Expect this step and the next to take longer: nobody waits for a pass over such tokens.

        It goes behind the step under way, or with the one that is made up then. What this step has
        given out is still to be read.
        """
        self._behind.now += tokens

    def learn_step(self, seconds: float) -> None:
        """Learn what one step took, for decoding and what was `note_behind` it."""
        seconds, behind = max(seconds, 0.0), self._behind
        now, behind.now = behind.now, 0
        before, behind.before = behind.before, now > 0
        if not self._decode.work or not (now or before):
            if behind.since_bare >= STALE_STEPS:
                # Of no weight any more, but still what an outlier is told by.
                self._decode = Rate(FORGOTTEN, FORGOTTEN * self.decode_step_s)
            behind.since_bare = 0
            self._decode.add(1.0, seconds)
            return
        behind.since_bare += 1
        if behind.since_bare % STALE_STEPS == 0:
            behind.bare_steps = BARE_STEPS
        behind.add(now, max(seconds - self.decode_step_s, 0.0))
        if not now or behind.steps == BEHIND_STEPS_MAX:
            self._prefill.add(behind.tokens, behind.seconds)
            behind.clear()

    def _whole_pass(self) -> int:
        """Return the most tokens of a step: what is read within the target, by what was measured.

        It changes by halves, so that the passes of a crowd are of few sizes.
        """
        token_s, tokens = self.prefill_token_s, self._chunk_tokens
        while 2 * tokens <= self._pass_tokens and 0.0 < 2 * tokens * token_s <= self._target_s:
            tokens *= 2
        return tokens

    def _fitting(self, now_s: float) -> int:
        """Return how many tokens there is time for beside those that are still to be read."""
        if self._until_s is None:
            return self._whole_tokens
        token_s = self.prefill_token_s
        if token_s <= 0.0:
            spent = self._whole_tokens - self._left_tokens
            return max(CHUNK_FLOOR_TOKENS - spent, 0)
        return max(int((self._until_s - now_s) / token_s) - self._unread_tokens, 0)


def chunk_widths(chunk_tokens: int) -> tuple[int, ...]:
    """Return the sizes of chunks where shapes are to be few: halves of a whole one."""
    widths = [chunk_tokens]
    while widths[-1] // 2 >= CHUNK_FLOOR_TOKENS:
        widths.append(widths[-1] // 2)
    return tuple(reversed(widths))
