"""What the engine thread judges a row's way to its mask by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.advance import Advance
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.masks.holds import FREE, WAITS, hold_of
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.tiny_model import VOCAB, write_tiny_model


@pytest.fixture(scope="module", name="formats")
def made_formats(tmp_path_factory: pytest.TempPathFactory) -> Constraints:
    """What compiles formats in a vocabulary of bytes."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return Constraints(load_tokenizer(folder), VOCAB)


@pytest.fixture(scope="module", name="pair")
def compiled_pair(formats: Constraints) -> Constraint:
    """A constraint whose output is two letters."""
    return formats.compile(ResponseFormat(FormatKind.REGEX, "[ab][cd]"))


def first_of(mask: bytes) -> int:
    """Return the first token that a mask allows."""
    return next(i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1)


def test_what_came_after_the_look_does_not_count(pair: Constraint) -> None:
    """A row that was seen to be late is late, whatever its thread has done since; looked at again
    it is judged anew.
    """
    matcher = replace(pair, mask_s=1.0).start()
    work = Advance(matcher, (first_of(matcher.mask()),))
    work.since_s = 0.0
    work.look(2.0)
    work.perform(lambda: 2.0)
    work.done = True

    with pytest.raises(InvalidRequest, match="takes too long"):
        work.check()
    assert work.seen.taken == 0
    work.look(2.0)
    work.check_mask()
    assert work.seen.taken == 1


def test_what_holds_a_row_is_a_number(pair: Constraint) -> None:
    """Nothing, a mask that is awaited, or the mask: another one is another number."""
    matcher = pair.start()
    work = Advance(matcher, (first_of(matcher.mask()),))
    first = hold_of(matcher, None)
    assert hold_of(None, None) == FREE
    assert hold_of(matcher, work) == WAITS
    work.perform(lambda: 0.0)
    assert len({FREE, WAITS, first, hold_of(matcher, None)}) == 4
