"""A call that was refused keeps nothing alive: neither its request nor what was made of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from mlxd_shared.domain.errors import InvalidRequest
from tests.shared.wire.kinds import KINDS, Kinds, failure, serving

TURNS = 100
"""Of the event loop, in which gRPC lets go of a call that has ended."""


class Marker:
    """Stands for what a method makes of its request."""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Have nothing freed but what nobody refers to any more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.asyncio
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda: InvalidRequest.of("a", "b"), lambda: KeyError("a bug")])
async def test_what_a_refused_call_made_is_freed_at_once(
    kind: str, make: Callable[[], Exception]
) -> None:
    """Without the collector of cycles: gRPC keeps an abort and its traceback in one."""
    markers: list[weakref.ref[Marker]] = []

    def ask(marker: Marker) -> None:
        raise LookupError(marker)

    def refuse() -> None:
        marker = Marker()
        markers.append(weakref.ref(marker))
        try:
            ask(marker)
        except LookupError as cause:
            raise make() from cause

    async with serving(Kinds(refuse)) as channel:
        await failure(channel, kind)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert [ref() for ref in markers] == [None]
