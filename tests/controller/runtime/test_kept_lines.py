"""Lines of a worker's output: bounded in number and bytes, read in pieces, awaited."""

from __future__ import annotations

import asyncio

import pytest

from mlxd_controller.runtime.kept_lines import KeptLines, Piece
from mlxd_shared.config import LINES_KEPT_BYTES_MAX, LINES_KEPT_MAX

LIMIT_S = 30.0


def keep(*lines: str) -> KeptLines:
    """Some lines, kept."""
    made = KeptLines()
    for line in lines:
        made.add(line)
    return made


def test_the_oldest_lines_make_room() -> None:
    """By number, and by bytes rather than characters."""
    many = keep(*(str(number) for number in range(LINES_KEPT_MAX + 3)))
    assert (many.begin, many.end) == (3, LINES_KEPT_MAX + 3)
    assert many.last(2) == (str(LINES_KEPT_MAX + 1), str(LINES_KEPT_MAX + 2))
    large = "ä" * (LINES_KEPT_BYTES_MAX // 8)  # a quarter of the bytes
    few = keep("first", large, large, large, large)
    assert (few.begin, few.end) == (1, 5)
    few.add("last")
    assert few.last(9) == (large, large, large, "last")


def test_lines_are_read_in_pieces() -> None:
    """Each within its bytes, but for one line that is larger; what is gone is counted."""
    lines = keep("aa", "bb", "cccccc", "d")
    assert lines.read(0, end=4, nbytes_max=4) == Piece(("aa", "bb"), 2, missed=0)
    assert lines.read(2, end=4, nbytes_max=4) == Piece(("cccccc",), 3, missed=0)
    assert lines.read(0, end=1, nbytes_max=4) == Piece(("aa",), 1, missed=0)
    assert lines.read(4, end=4, nbytes_max=4) == Piece((), 4, missed=0)
    for number in range(LINES_KEPT_MAX):
        lines.add(str(number))
    assert lines.read(1, end=6, nbytes_max=99) == Piece(("0", "1"), 6, missed=3)
    assert lines.read(1, end=2, nbytes_max=99) == Piece((), 4, missed=3)


@pytest.mark.asyncio
async def test_a_reader_waits_for_a_line_or_the_end() -> None:
    """And is told which; a line that is there is waited for by nobody."""
    lines = keep("a")
    assert await lines.wait(0)
    second, third = (asyncio.create_task(lines.wait(number)) for number in (1, 2))
    await asyncio.sleep(0)
    lines.add("b")
    async with asyncio.timeout(LIMIT_S):
        assert await second
        assert not third.done()
        lines.close()
        assert not await third
        assert not await lines.wait(2)
        assert await lines.wait(1)
