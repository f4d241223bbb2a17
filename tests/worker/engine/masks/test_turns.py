"""When a row counts as slow, and how those of one constraint keep out of each other's way."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxd_shared import config
from mlxd_worker.engine.masks.advance import Advance
from mlxd_worker.engine.masks.constraint import Constraint, Matcher, Turns


@pytest.fixture
def plain() -> Constraint:
    """A constraint."""
    return Constraint(LLMatcher(LLTokenizer("byte"), "", log_level=0), b"")


def test_a_row_is_slow_as_soon_as_its_masks_are(plain: Constraint) -> None:
    """However many quick ones it had before; and quick again a few masks after the slow one."""
    matcher = plain.start()
    quick_s = config.CONSTRAINT_QUICK_MASK_S
    for _ in range(1000):
        matcher.note(quick_s / 2)
        assert not matcher.is_slow
    matcher.note(5 * quick_s)
    assert matcher.is_slow
    for _ in range(4):
        matcher.note(quick_s / 100)
    assert not matcher.is_slow


def test_a_row_is_as_slow_as_another_of_its_constraint(plain: Constraint) -> None:
    """It waits for that one's turns; once that one has gone, it is quick again."""
    one, other = plain.start(), plain.start()
    one.note(1.0)
    assert other.is_slow
    other.note(0.0)
    assert other.is_slow
    del one
    assert not other.is_slow


@pytest.mark.parametrize("tokens", [(), (1,)], ids=["mask", "token"])
def test_a_row_that_has_failed_makes_no_other_slow(
    plain: Constraint, tokens: tuple[int, ...]
) -> None:
    """Even where somebody still refers to it, as its own error does."""
    matcher = Matcher(replace(plain, stream_s=0.5), cast("LLMatcher", Seen(plain.turns)))
    matcher.accept(1)
    matcher.note(1.0)
    failed = Advance(matcher, tokens)
    assert plain.start().is_slow
    failed.perform(lambda: 0.0)

    assert failed.error or failed.mask_error
    assert not plain.start().is_slow


def test_rows_of_a_constraint_take_turns(plain: Constraint) -> None:
    """The library has one lock for them all, and would wait for it with the interpreter."""
    turns = Turns()
    native = Seen(turns)
    matcher = Matcher(replace(plain, turns=turns), cast("LLMatcher", native))
    matcher.accept(1)
    matcher.mask()

    assert native.called == ["consume_token", "compute_bitmask"]
    assert not turns.lock.locked()


class Seen:
    """A matcher of the library that is called only in its turn."""

    def __init__(self, turns: Turns) -> None:
        self.called: list[str] = []
        self._turns = turns

    def consume_token(self, token_id: int) -> bool:
        """Take any."""
        del token_id
        assert self._turns.lock.locked()
        self.called.append("consume_token")
        return True

    def compute_bitmask(self) -> bytes:
        """Allow nothing."""
        assert self._turns.lock.locked()
        self.called.append("compute_bitmask")
        return b""

    def is_error(self) -> bool:
        """Say no."""
        return False

    def is_stopped(self) -> bool:
        """Say no."""
        return False
