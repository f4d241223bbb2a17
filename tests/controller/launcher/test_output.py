"""What a child prints, line by line."""

from __future__ import annotations

import asyncio

import pytest

from mlxd_controller.launcher.output import lines_of


@pytest.mark.asyncio
async def test_the_last_line_counts_whole_or_not_and_an_empty_one_never() -> None:
    """A process that ends early may leave no more than half a line to say why."""
    stream = asyncio.StreamReader()
    stream.feed_data(b"one\r\n\ntwo\nhalf")
    stream.feed_eof()
    assert [line async for line in lines_of(stream)] == ["one", "two", "half"]
