"""How many prompt tokens a step may evaluate where chunks are of few sizes, as on a GPU."""

from __future__ import annotations

import pytest

from mlxd_worker.engine.pacing import Pacer, chunk_widths
from tests.worker.engine.test_pacing import CHUNK, MANY, TARGET_S


def test_widths_are_few_where_shapes_are_bounded() -> None:
    """A prompt's chunks, but for its last, are of few sizes, all within the whole chunk."""
    widths = chunk_widths(CHUNK)
    assert widths == (32, 64, 128, 256, 512)
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK, few_widths=True)
    pacer.learn_prefill(1000, 1.0)
    pacer.learn_step(0.02)
    for spent_s in (0.0, 0.01, 0.03, 0.06, 0.2):
        pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
        assert pacer.chunk(4000, spent_s) in widths
    pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
    assert pacer.chunk(37, 0.0) == 37


@pytest.mark.parametrize(
    ("token_s", "whole"), [(1e-3, 512), (1e-4, 512), (9e-5, 1024), (4e-5, 2048), (1e-6, 2048)]
)
def test_a_pass_is_what_the_device_reads_in_the_target_time(token_s: float, whole: int) -> None:
    """A chunk, twice or four times as much: for one prompt, or for several together."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK, pass_tokens=4 * CHUNK, few_widths=True)
    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert pacer.chunk(4000, 0.0) == CHUNK, "nothing was measured"
    pacer.learn_prefill(CHUNK, CHUNK * token_s)

    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert pacer.chunk(4000, 0.0) == whole
    assert pacer.chunk(4000, 0.0) == 0
    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert sum(iter(lambda: pacer.chunk(128, 0.0), 0)) == whole


def test_a_long_prompt_is_told_what_others_leave_of_a_step() -> None:
    """A piece is less than a chunk, of a prompt that has a chunk left; who ends takes it."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK, pass_tokens=4 * CHUNK, few_widths=True)
    pacer.learn_prefill(CHUNK, TARGET_S / 4)

    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert not pacer.leaves_a_piece(MANY, 0.0), "nobody has had any of it"
    assert pacer.chunk(4 * CHUNK - 600, 0.0) == 4 * CHUNK - 600
    assert not pacer.leaves_a_piece(MANY, 0.0), "600 are left"
    assert pacer.chunk(200, 0.0) == 200
    assert pacer.leaves_a_piece(CHUNK, 0.0), "400 are left"
    assert not pacer.leaves_a_piece(CHUNK - 1, 0.0)
    assert pacer.chunk(390, 0.0) == 390
    assert not pacer.leaves_a_piece(MANY, 0.0), "nobody has any of 10"


def test_a_step_of_one_chunk_is_shared_as_it_comes() -> None:
    """Else one short prompt a step would keep a long one waiting for ever."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK, pass_tokens=4 * CHUNK, few_widths=True)
    pacer.learn_prefill(CHUNK, 2 * TARGET_S)

    pacer.begin_step(0.0, decoding=False, waiting_tokens=MANY)
    assert pacer.chunk(1, 0.0) == 1
    assert not pacer.leaves_a_piece(MANY, 0.0)
    assert pacer.chunk(CHUNK, 0.0) == 256


def test_a_step_that_rows_leave_little_of_is_shared_as_it_comes() -> None:
    """As much as a pass may have is not what this step has: there is not time for two chunks."""
    pacer = Pacer(target_s=TARGET_S, chunk_tokens=CHUNK, pass_tokens=4 * CHUNK, few_widths=True)
    pacer.learn_prefill(CHUNK, TARGET_S / 4)
    pacer.learn_step(TARGET_S / 2)

    pacer.begin_step(0.0, decoding=True, waiting_tokens=MANY)
    assert pacer.chunk(40, 0.0) == 40
    assert not pacer.leaves_a_piece(MANY, 0.0), "this step began with 1,024 less one by rounding"
