"""Streams in a mix of others, compared with their lone runs token by token.

Invariants:
- A stream is compared up to its first divergence. That counts as a near tie where a slack below
  `NEAR_TIE` of the lone run's draw explains it, and is an error otherwise.
- A stream that does not diverge has the text, the end and the log-probabilities of its lone run.
- When a mix has ended, its engine holds nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.support.engines import STEPS_MAX, Collected, TinyEngine
from tests.support.near_ties import NEAR_TIE, slack_of
from tests.support.trained import Trained

NEAR_TIES_MAX = 1e-4
"""Of the tokens compared."""
PREFIX_NBYTES = 1 << 30
CHUNKS = (7, 32, 64, 512)
TICKS_S = (1e-5, 1e-3, 0.1)
GUESSES = (0, 0, 3, 8)
ARRIVES_MAX = 40
LEAVES_AFTER_MAX = 40


@dataclass(frozen=True, slots=True)
class Member:
    """One stream's part in a mix."""

    stream: int
    arrives: int
    """After how many steps."""
    leaves_after: int | None
    """After how many of its tokens its client cancels; None: it stays."""
    guesses: int
    """How many tokens it may guess at once; its lone run guesses none."""
    priority: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Who shares an engine, and what kind of engine."""

    members: tuple[Member, ...]
    rows_max: int
    chunk: int
    tick_s: float
    """By what its clock goes on; paces prefill."""
    prefix: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a stream got another token than alone, and how large a slack explains that."""

    stream: int
    position: int
    alone: int
    together: int
    slack: float


@dataclass(slots=True)
class Tally:
    """What has been compared."""

    mixes: int = 0
    streams: int = 0
    tokens: int = 0
    guessed: int = 0
    """Tokens among them, or behind a near tie, that were guessed."""
    reused: int = 0
    """Prompt tokens whose state came from another row."""
    near_ties: list[Divergence] = field(default_factory=list)

    def __str__(self) -> str:
        slacks = ", ".join(f"{tie.slack:.1e}" for tie in self.near_ties)
        return (
            f"{self.tokens} tokens of {self.streams} streams in {self.mixes} mixes compared, "
            f"{self.guessed} guessed, {self.reused} prompt tokens reused: "
            f"{len(self.near_ties)} diverge at near ties [{slacks}], none elsewhere"
        )

    @property
    def within_bound(self) -> bool:
        """Whether near ties are as rare as they must be; one alone says nothing."""
        return len(self.near_ties) <= max(1.0, self.tokens * NEAR_TIES_MAX)


def mixes(
    *, streams: int, members_min: int, members_max: int, rows_max: int
) -> st.SearchStrategy[Mix]:
    """Return mixes of the first `streams` streams, of which at most `rows_max` run at once."""
    stays: st.SearchStrategy[int | None] = st.none()
    member = st.builds(
        Member,
        stream=st.integers(0, streams - 1),
        arrives=st.integers(0, ARRIVES_MAX),
        leaves_after=st.one_of(stays, stays, stays, st.integers(1, LEAVES_AFTER_MAX)),
        guesses=st.sampled_from(GUESSES),
        priority=st.integers(0, 1),
    )
    return st.builds(
        Mix,
        members=st.lists(member, min_size=members_min, max_size=members_max).map(tuple),
        rows_max=st.integers(2, rows_max),
        chunk=st.sampled_from(CHUNKS),
        tick_s=st.sampled_from(TICKS_S),
        prefix=st.booleans(),
    )


def compare(trained: Trained, mix: Mix, tally: Tally) -> None:
    """Run a mix, compare each stream with its lone run, and add to the tally.

    Raises:
        AssertionError: a stream that differs by more than a near tie, or an engine that keeps
            something of the mix.
    """
    tally.mixes += 1
    for member, sink in zip(mix.members, _run(trained, mix), strict=True):
        tally.streams += 1
        tally.guessed += sink.guessed
        tally.reused += sink.reused
        alone = trained.alone(member.stream)
        compared = min(len(alone.drawn), len(sink.drawn))
        place = next((i for i in range(compared) if alone.drawn[i] != sink.drawn[i]), None)
        if place is None:
            tally.tokens += compared
            _check_same_end(alone, sink, left=member.leaves_after is not None)
            _check_same_logprobs(alone, sink)
            continue
        tally.tokens += place + 1
        divergence = _judge(trained, member.stream, place, sink)
        assert divergence.slack < NEAR_TIE, divergence
        tally.near_ties.append(divergence)


def _check_same_end(alone: Collected, sink: Collected, *, left: bool) -> None:
    if sink.ended or not left:
        assert (sink.drawn, sink.text, sink.outcome) == (alone.drawn, alone.text, alone.outcome)
    else:
        assert alone.text.startswith(sink.text)


def _check_same_logprobs(alone: Collected, sink: Collected) -> None:
    """Assert equal log-probabilities, of the tokens and of the best ones, up to rounding."""
    for one, other in zip(alone.logprobs, sink.logprobs, strict=False):
        assert abs(one.chosen.logprob - other.chosen.logprob) < NEAR_TIE
        for best, same in zip(one.top, other.top, strict=True):
            assert abs(best.logprob - same.logprob) < NEAR_TIE


def _judge(trained: Trained, stream: int, place: int, sink: Collected) -> Divergence:
    alone, together = trained.alone(stream).drawn[place], sink.drawn[place]
    slack = slack_of(trained.steps(stream)[place], (alone, together))
    return Divergence(stream, place, alone, together, slack)


def _run(trained: Trained, mix: Mix) -> list[Collected]:
    """Return what each member gets."""
    tiny = trained.engine(
        rows_max=mix.rows_max,
        chunk=mix.chunk,
        tick_s=mix.tick_s,
        prefix_nbytes=PREFIX_NBYTES if mix.prefix else 0,
    )
    coming = sorted(range(len(mix.members)), key=lambda index: mix.members[index].arrives)
    submitted = {}
    for step in range(STEPS_MAX):
        while coming and mix.members[coming[0]].arrives <= step:
            index = coming.pop(0)
            member = mix.members[index]
            submitted[index] = trained.submit(
                tiny, member.stream, speculation_depth=member.guesses, priority=member.priority
            )
        tiny.engine.step()
        for index, (request, sink) in submitted.items():
            most = mix.members[index].leaves_after
            if most is not None and len(sink.ids) >= most and not sink.ended:
                tiny.engine.cancel(request.stream)
        if not coming and not tiny.engine.busy:
            check_nothing_left(tiny)
            return [submitted[index][1] for index in range(len(mix.members))]
    raise AssertionError("the mix does not come to an end")


def check_nothing_left(tiny: TinyEngine) -> None:
    """Assert that an idle engine holds no row, no spare once it rests, no snapshot once told."""
    tiny.rest()
    tiny.prefix.shrink(0)
    left = (
        tiny.engine.streams,
        tiny.caches.nbytes,
        tiny.caches.contents.book.live,
        tiny.prefix.nbytes,
    )
    assert left == (0, 0, 0, 0), left
