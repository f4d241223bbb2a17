"""What an answer owns is closed with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from mlxd_gateway.common.owned import OwningResponse, next_of
from mlxd_gateway.common.responses import LINES


async def parts(*, fails: bool) -> AsyncIterator[bytes]:
    """Yield one chunk, then fail or end."""
    yield b"x"
    if fails:
        raise OSError("broken off")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.asyncio
async def test_what_is_streamed_from_is_closed_however_the_answer_ends(*, fails: bool) -> None:
    """Once, after the last chunk."""
    seen: list[Any] = []

    async def close() -> None:
        seen.append("closed")

    async def send(message: MutableMapping[str, Any]) -> None:
        seen.append(message.get("body"))

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("servers of this version tell of a client's end by OSError")

    answer = OwningResponse(parts(fails=fails), close, media_type=LINES)
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "GET"}
    try:
        await answer(scope, receive, send)
    except Exception:  # noqa: BLE001 - whatever the framework makes of it
        assert fails
    else:
        assert not fails
    assert seen.count("closed") == 1
    assert seen[-1] == "closed"
    assert b"x" in seen


@pytest.mark.asyncio
async def test_the_end_of_items_is_none() -> None:
    """Items come one at a time, and then None each time."""
    items = parts(fails=False)
    assert [await next_of(items) for _ in range(3)] == [b"x", None, None]
