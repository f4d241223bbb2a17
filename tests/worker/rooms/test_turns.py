"""Whose turn it is: kinds of calls in turn, each in its order, and no more than so many wait."""

from __future__ import annotations

import asyncio

import pytest

from mlxd_shared.domain.errors import QueueFull
from mlxd_worker.rooms.turns import Turns


def turns(*, waiting_max: int = 100, waiting_nbytes_max: int = 1000) -> Turns:
    return Turns(
        "texts", turns_max=1, waiting_max=waiting_max, waiting_nbytes_max=waiting_nbytes_max
    )


async def waiting(its: Turns, kind: str, nbytes: int = 1) -> asyncio.Task[None]:
    """Return somebody who waits by now, or has its turn."""
    task = asyncio.create_task(its.acquire(kind, nbytes))
    await asyncio.sleep(0)
    return task


@pytest.mark.asyncio
async def test_a_flood_of_one_kind_holds_another_up_by_one_turn() -> None:
    """Kinds take turns, however many of one came first; within a kind the first goes first."""
    its = turns()
    await its.acquire("tokenize", 1)
    order: list[str] = []

    async def one(name: str, kind: str) -> None:
        await its.acquire(kind, 1)
        order.append(name)
        its.release()

    tasks = [asyncio.create_task(one(f"t{i}", "tokenize")) for i in range(4)]
    tasks += [asyncio.create_task(one(f"g{i}", "generate")) for i in range(2)]
    await asyncio.sleep(0)
    its.release()
    await asyncio.gather(*tasks)

    assert order == ["t0", "g0", "t1", "g1", "t2", "t3"]
    assert its.are_idle


@pytest.mark.asyncio
async def test_so_many_wait_and_so_many_bytes_and_no_more() -> None:
    """Each bound has its own error, which tells when to come again; a free turn needs none."""
    few, small = turns(waiting_max=1), turns(waiting_nbytes_max=10)
    await few.acquire("a", 5000)
    await small.acquire("a", 5000)
    tasks = [await waiting(few, "a"), await waiting(small, "a", 6)]

    with pytest.raises(QueueFull) as caught:
        await few.acquire("b", 1)
    assert (caught.value.queue, caught.value.limit) == ("texts", 1)
    assert caught.value.retry_after_s > 0
    with pytest.raises(QueueFull) as caught:
        await small.acquire("b", 5)
    assert (caught.value.queue, caught.value.limit) == ("bytes of texts", 10)
    tasks.append(await waiting(small, "b", 4))
    for its in (few, small, small):
        its.release()
    await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_who_leaves_holds_no_place_and_keeps_no_turn() -> None:
    """Whether it leaves while it waits, or at the moment when it is called."""
    its = turns(waiting_max=2, waiting_nbytes_max=10)
    await its.acquire("a", 1)
    left, called = await waiting(its, "a", 5), await waiting(its, "b", 5)
    left.cancel()
    await asyncio.wait([left])
    third = await waiting(its, "c", 5)
    its.release()
    called.cancel()  # its turn has come, and it has not seen it yet
    await asyncio.wait([called])
    await third
    assert left.cancelled()
    assert called.cancelled()
    assert its.are_idle


@pytest.mark.asyncio
async def test_who_leaves_before_a_turn_ends_does_not_take_it_along() -> None:
    """The turn goes to the next one, or is free, though who left has not run since."""
    its = turns()
    await its.acquire("a", 1)
    left, after = await waiting(its, "a"), await waiting(its, "a")
    left.cancel()
    its.release()
    await asyncio.wait([left, after])
    assert left.cancelled()
    assert its.are_idle

    last = await waiting(its, "a")
    last.cancel()
    its.release()
    await asyncio.wait([last])
    assert last.cancelled()
    await asyncio.wait_for(its.acquire("a", 1), 60)
