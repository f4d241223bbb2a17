"""How many prompt tokens a step may evaluate, on a clock that only the test moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.engine.pacing import (
    BARE_STEPS,
    BEHIND_STEPS_MAX,
    CHUNK_FLOOR_TOKENS,
    OUTLIER,
    STALE_STEPS,
    Pacer,
    Rate,
)

TARGET_S = 0.1
CHUNK = 512
MANY = 1 << 20
"""Prompt tokens that wait: so many that a step has as much as it may."""


@dataclass(slots=True)
class Machine:
    """A machine of a known speed, and the pacer that learns it."""

    pacer: Pacer
    start_s: float
    token_s: float
    decode_s: float
    now_s: float = 0.0

    def step(self, wanted: int, *, decoding: bool) -> tuple[int, float]:
        """Prefill as much of `wanted` as one step may, then decode; return tokens and seconds."""
        begun_s, left = self.now_s, wanted
        self.pacer.begin_step(self.now_s, decoding=decoding, waiting_tokens=wanted)
        while left and (tokens := self.pacer.chunk(left, self.now_s)):
            took_s = self.start_s + tokens * self.token_s
            self.now_s += took_s
            self.pacer.learn_prefill(tokens, took_s)
            left -= tokens
        if decoding:
            self.now_s += self.decode_s
            self.pacer.learn_step(self.decode_s)
        return wanted - left, self.now_s - begun_s


def machine(*, start_s: float = 0.0, token_s: float = 1e-3, decode_s: float = 0.02) -> Machine:
    """Return a machine on which nothing was measured yet."""
    return Machine(Pacer(target_s=TARGET_S, chunk_tokens=CHUNK), start_s, token_s, decode_s)


def test_a_step_has_a_whole_chunk_where_nobody_decodes() -> None:
    """Full speed: one long prompt's chunk, or several short prompts together, and no more."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert pacer.chunk(4000, 0.0) == CHUNK
    assert pacer.chunk(4000, 0.0) == 0

    pacer.begin_step(5.0, decoding=False, waiting_tokens=MANY)
    assert [pacer.chunk(200, 9.0) for _ in range(4)] == [200, 200, 112, 0]


def test_a_crumb_is_left_for_the_next_step() -> None:
    """What is left of a step below the floor is given to a prompt that ends with it, only."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert pacer.chunk(CHUNK - 5, 0.0) == CHUNK - 5
    assert pacer.chunk(100, 0.0) == 0
    assert pacer.chunk(5, 0.0) == 5


@pytest.mark.parametrize(("fits", "over", "width"), [(70, 32, 102), (70, 33, 70), (40, 21, 40)])
def test_a_prompt_is_ended_rather_than_left_in_crumbs(fits: int, over: int, width: int) -> None:
    """A step goes beyond its time by a crumb, or half of what fits, where that ends a prompt."""
    its = machine()
    for _ in range(3):
        its.step(CHUNK, decoding=False)
        its.step(0, decoding=True)
    its.pacer.begin_step(its.now_s, decoding=True, waiting_tokens=MANY)

    room_s = TARGET_S - its.decode_s
    assert its.pacer.chunk(fits + over, its.now_s + room_s - (fits + 0.5) * its.token_s) == width


@pytest.mark.parametrize(("waiting", "gentle"), [(0, True), (40, True), (193, False)])
def test_only_little_goes_by_gently(waiting: int, *, gentle: bool) -> None:
    """However fast prompts are, so many tokens are not read in the smallest pieces."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.learn_prefill(CHUNK, CHUNK * 1e-5)
    pacer.learn_step(0.02)
    pacer.begin_step(0.0, decoding=True, waiting_tokens=waiting)
    assert pacer.gentle is gentle


def test_what_was_never_measured_is_not_little() -> None:
    """Before any prompt was timed nobody knows that it would be little, so it is timed."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.learn_step(0.02)
    pacer.begin_step(0.0, decoding=True, waiting_tokens=40)
    assert not pacer.gentle


@pytest.mark.parametrize(("waiting", "taken"), [(50, 20), (120, 20), (360, 60), (4000, 80)])
def test_a_step_takes_a_part_of_what_waits(waiting: int, taken: int) -> None:
    """One prompt goes by in pieces of a decode step's length, many in what the target leaves."""
    its = machine()
    for _ in range(3):
        its.step(CHUNK, decoding=False)
        its.step(0, decoding=True)
    tokens, _ = its.step(waiting, decoding=True)
    assert max(taken, CHUNK_FLOOR_TOKENS) <= tokens <= max(taken, CHUNK_FLOOR_TOKENS) + 1


@pytest.mark.parametrize("start_s", [0.0, 0.005, 0.02])
def test_a_step_comes_to_the_target(start_s: float) -> None:
    """After a few steps, prefill and decode together take what is aimed at, and not less than 3/4.

    Whatever a pass costs beside its tokens: the first estimate comes from a whole chunk.
    """
    its = machine(start_s=start_s)
    its.step(4000, decoding=False)
    for _ in range(15):
        its.step(4000, decoding=True)
    for _ in range(5):
        _, took_s = its.step(4000, decoding=True)
        assert 0.75 * TARGET_S <= took_s <= TARGET_S * 1.05


def begin_beside_rows() -> Machine:
    """Return a machine that was measured, in a step beside rows that decode."""
    its = machine(token_s=1e-3, decode_s=0.02)
    its.step(CHUNK, decoding=False)
    its.step(CHUNK, decoding=True)
    its.pacer.begin_step(its.now_s, decoding=True, waiting_tokens=MANY)
    return its


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_passes_that_nobody_waits_for_are_learnt_from_steps(factor: float, late: int) -> None:
    """Steps with prompts, on end or one by one, take longer; whether at once or in the next one."""
    its = machine(token_s=1e-4, decode_s=0.02)
    its.step(CHUNK, decoding=False)
    its.step(0, decoding=True)
    token_s = factor * its.token_s
    behind = [0] * late
    for tokens in ([64, 128, 0] + [100] * 11 + [0, 0]) * 6:
        its.pacer.begin_step(its.now_s, decoding=True, waiting_tokens=tokens)
        if tokens:
            its.pacer.note_behind(tokens)
        behind.append(tokens)
        its.pacer.learn_step(its.decode_s + behind.pop(0) * token_s)

    assert its.pacer.prefill_token_s == pytest.approx(token_s, rel=0.1)
    assert its.pacer.decode_step_s == pytest.approx(its.decode_s, rel=0.01)


def test_prompts_without_end_are_learnt_too() -> None:
    """Where every step takes some along there is no step without to tell what they took."""
    its = machine(token_s=1e-4, decode_s=0.02)
    its.step(CHUNK, decoding=False)
    its.step(0, decoding=True)
    for _ in range(10 * BEHIND_STEPS_MAX):
        its.pacer.note_behind(100)
        its.pacer.learn_step(its.decode_s + 100 * 5e-4)

    assert its.pacer.prefill_token_s == pytest.approx(5e-4, rel=0.1)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("first_s", "decode_s"), [(0.02, 0.15), (0.02, 0.12), (0.3, 0.02)])
def test_decoding_that_changes_is_followed_while_prompts_never_cease(
    first_s: float, decode_s: float, late: int
) -> None:
    """A crowd comes, or goes: what steps take is soon known for what it is, and prompts go on."""
    its = machine(token_s=3e-4, decode_s=first_s)
    its.step(CHUNK, decoding=False)
    its.step(0, decoding=True)
    behind, last, read = [0] * late, 0, 0
    for _ in range(8 * (STALE_STEPS + BARE_STEPS)):
        its.pacer.begin_step(its.now_s, decoding=True, waiting_tokens=MANY)
        tokens = its.pacer.chunk(4000, its.now_s)
        its.pacer.note_behind(tokens)
        behind.append(tokens)
        took_s = decode_s + behind.pop(0) * its.token_s
        its.now_s += took_s
        its.pacer.learn_step(took_s)
        last, read = tokens or last, read + tokens

    assert its.pacer.decode_step_s == pytest.approx(decode_s, rel=0.1)
    assert its.pacer.prefill_token_s == pytest.approx(its.token_s, rel=0.2)
    assert last == pytest.approx(max(TARGET_S - decode_s, decode_s) / its.token_s, rel=0.25)
    assert read * its.token_s > 0.3 * its.now_s


def test_a_stall_while_decoding_is_measured_is_not_taken_at_its_word() -> None:
    """Else steps of another second would be planned for."""
    its = machine(token_s=3e-4, decode_s=0.02)
    its.step(CHUNK, decoding=False)
    its.step(0, decoding=True)
    for _ in range(STALE_STEPS):
        its.pacer.note_behind(100)
        its.pacer.learn_step(its.decode_s + 100 * its.token_s)
    for took_s in (its.decode_s, 1.0):
        its.pacer.learn_step(took_s)

    assert its.pacer.decode_step_s == pytest.approx(OUTLIER * its.decode_s)


def test_few_steps_are_without_prompts_that_never_cease() -> None:
    """Two of 26, on end: the others have prompts."""
    its = machine(token_s=3e-4, decode_s=0.02)
    its.step(CHUNK, decoding=False)
    its.step(0, decoding=True)
    given_out = []
    for _ in range(4 * (STALE_STEPS + BARE_STEPS)):
        its.pacer.begin_step(its.now_s, decoding=True, waiting_tokens=MANY)
        tokens = its.pacer.chunk(100, its.now_s)
        given_out.append(tokens > 0)
        its.pacer.note_behind(tokens)
        its.pacer.learn_step(its.decode_s + tokens * its.token_s)

    assert given_out == ([True] * STALE_STEPS + [False] * BARE_STEPS) * 4


def test_no_step_is_held_free_of_prompts_where_nobody_decodes() -> None:
    """Nothing is to be measured then."""
    its = machine()
    its.step(CHUNK, decoding=False)
    its.step(0, decoding=True)
    for _ in range(STALE_STEPS):
        its.pacer.note_behind(100)
        its.pacer.learn_step(0.1)
    its.pacer.begin_step(its.now_s, decoding=False, waiting_tokens=MANY)
    assert its.pacer.chunk(4000, its.now_s) == CHUNK


def test_what_goes_behind_a_step_is_still_to_be_read() -> None:
    """Nobody has waited for it: it takes its part of the step's time all the same."""
    its = begin_beside_rows()
    assert its.pacer.chunk(60, its.now_s) == 60
    its.pacer.note_behind(60)
    assert its.pacer.chunk(4000, its.now_s) <= (TARGET_S - its.decode_s) / its.token_s - 60 + 1


def test_short_prompts_share_a_step() -> None:
    """Beside rows that decode, as many short prompts go together as there is time for."""
    its = begin_beside_rows()
    sizes = []
    while tokens := its.pacer.chunk(19, its.now_s):
        sizes.append(tokens)
        its.now_s += tokens * its.token_s
        its.pacer.learn_prefill(tokens, tokens * its.token_s)

    assert sizes == [19] * 4


def test_prompts_of_one_pass_share_its_time() -> None:
    """What is given out before any of it is read is no more than fits together."""
    its = begin_beside_rows()
    sizes = []
    while tokens := its.pacer.chunk(19, its.now_s):
        sizes.append(tokens)
    assert sizes == [19] * 4

    its.now_s += 0.003
    assert not its.pacer.over(its.now_s)
    its.now_s += 0.002
    assert its.pacer.over(its.now_s), "what was given out is still to be read"


def test_without_knowledge_a_step_has_the_floor() -> None:
    """Beside rows that decode, the first chunk is small: nobody knows what it costs."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
    assert pacer.chunk(4000, 0.0) == CHUNK_FLOOR_TOKENS


@given(token_s=st.floats(1e-6, 1.0), decode_s=st.floats(0.0, 5.0), late_s=st.floats(0.0, 10.0))
def test_prefill_always_goes_on(token_s: float, decode_s: float, late_s: float) -> None:
    """However slow decoding and the machine are, a step has at least the floor, or what is left."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.learn_prefill(CHUNK, CHUNK * token_s)
    pacer.learn_step(decode_s)
    for wanted in (1, 7, 4000):
        pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
        assert CHUNK >= pacer.chunk(wanted, late_s) >= min(wanted, CHUNK_FLOOR_TOKENS)


@pytest.mark.parametrize("decode_s", [0.4, 0.6 * TARGET_S])
def test_prefill_keeps_its_share_of_slow_decoding(decode_s: float) -> None:
    """Where a decode step takes most of the target or more, prefill gets as long as it does."""
    its = machine(token_s=1e-3, decode_s=decode_s)
    its.step(CHUNK, decoding=False)
    for _ in range(20):
        tokens, _ = its.step(4000, decoding=True)

    assert tokens == pytest.approx(decode_s / 1e-3, rel=0.02)


def test_one_outlier_changes_little() -> None:
    """A step during which the machine did something else is not taken at its word."""
    its = machine()
    its.step(CHUNK, decoding=False)
    for _ in range(20):
        before, _ = its.step(4000, decoding=True)
    its.pacer.learn_prefill(before, 60.0)
    its.pacer.learn_step(60.0)

    assert its.pacer.prefill_token_s < OUTLIER * its.token_s
    assert its.pacer.decode_step_s < OUTLIER * its.decode_s


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    """A lasting change of speed is learned within a dozen steps."""
    its = machine()
    its.step(CHUNK, decoding=False)
    for _ in range(20):
        its.step(4000, decoding=True)
    its.token_s *= factor
    for _ in range(24):
        its.step(4000, decoding=True)

    assert its.pacer.prefill_token_s == pytest.approx(its.token_s, rel=0.1)


def test_a_clock_that_stands_still_is_no_fault() -> None:
    """Measurements of nothing at all leave the pacer as one that knows nothing."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    for _ in range(3):
        pacer.learn_prefill(10, 0.0)
        pacer.learn_step(0.0)
    pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
    assert pacer.chunk(4000, 0.0) == CHUNK_FLOOR_TOKENS
    pacer.learn_prefill(10, 1.0)
    assert pacer.prefill_token_s > 0.0


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0.0, 1e3)), max_size=60))
def test_an_estimate_lies_within_what_was_measured(samples: list[tuple[int, float]]) -> None:
    """Seconds a unit are never above or below every measurement."""
    rate = Rate()
    for work, seconds in samples:
        rate.add(work, seconds)
    each = [seconds / work for work, seconds in samples]
    low, high = min(each, default=0.0), max(each, default=0.0)
    assert rate.per_unit_s <= high * (1 + 1e-9)
    assert rate.per_unit_s >= low * (1 - 1e-9)


def test_tokens_that_come_together_end_a_step_or_begin_one() -> None:
    """What is cut short leaves the rest to others; what is more than a step has left is the next
    step's, and then all of it."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK)
    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert pacer.chunk(MANY, 0.0, fit=lambda tokens: min(tokens, 300)) == 300
    assert pacer.chunk(MANY, 0.0, fit=lambda tokens: max(tokens, 256)) == 0
    assert pacer.chunk(MANY, 0.0) == CHUNK - 300
    pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
    assert pacer.chunk(MANY, 0.0, fit=lambda tokens: max(tokens, 256)) == 256
    assert pacer.chunk(MANY, 0.0, fit=lambda tokens: max(tokens, 256)) == 0
