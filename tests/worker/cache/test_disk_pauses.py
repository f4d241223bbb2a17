"""Blocks that are written beside rows: a tensor, then a pause, unless somebody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxd_shared.blocks.block_file import encode
from mlxd_shared.blocks.store import BlockStore
from mlxd_worker.cache.disk.pauses import PAUSE_S_MAX, SPARE, Pauses
from mlxd_worker.cache.disk.tier import BlockTier
from tests.shared.blocks.made_blocks import AMPLE, chain_of, contents_of, open_blocks

CHAIN = chain_of(3, 6)
WAIT_S = 60.0


class Clock:
    """A clock that a test winds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def test_a_pause_is_by_the_work_before_it() -> None:
    """What is rested is no work: it counts for no rate, and makes no pause longer."""
    clock, rests = Clock(), list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        clock.now_s += seconds

    pauses = Pauses(clock=clock, rest=rest)
    for work_s in (2**-8, 2**-7):
        clock.now_s += work_s
        pauses()

    assert rests == [SPARE * 2**-8, SPARE * 2**-7]
    assert pauses.rested_s == sum(rests)
    assert clock.now_s - pauses.rested_s == 3 * 2**-8


def test_pauses_are_between_the_parts_of_a_block(tmp_path: Path) -> None:
    """The header and each tensor; a block that is there already has none."""
    called: list[int] = []
    store = open_blocks(tmp_path / "b")
    assert store.write(CHAIN[0], between=lambda: called.append(len(called)))
    assert len(called) == len(encode(CHAIN[0])) - 1
    assert store.write(CHAIN[0], between=lambda: called.append(-1))
    assert -1 not in called
    assert contents_of(store.read(CHAIN[0].id)) == contents_of(CHAIN[0])
    store.close()


def test_a_slow_disk_is_given_no_longer_pauses() -> None:
    """It takes no processor while it is waited for."""
    clock, rests = Clock(), list[float]()
    pauses = Pauses(clock=clock, rest=rests.append)
    clock.now_s += 60.0
    pauses()

    assert rests == [PAUSE_S_MAX]


class Resting(BlockTier):
    """A tier whose pauses do not end by themselves; says when it is in one."""

    def __init__(self, store: BlockStore) -> None:
        self.rests = threading.Event()
        super().__init__(store)

    def _rest(self, seconds: float) -> None:
        self.rests.set()
        super()._rest(10 * WAIT_S)


def wait_for_all(tier: BlockTier) -> None:
    """Wait until all is written, as somebody does who has a use for it."""
    assert tier.flush(timeout_s=WAIT_S)


def wait_for_room(tier: BlockTier) -> None:
    """Wait until more can be handed over, as a cache does that is saved."""
    with tier.hurry():
        while tier.is_writing(CHAIN[0].id):
            tier.wait()


def change_the_budget(tier: BlockTier) -> None:
    """Have the store keep to another budget, and wait until it does."""
    applied = threading.Event()
    tier.set_budget(AMPLE, applied.set)
    assert applied.wait(WAIT_S)


@pytest.mark.parametrize("hurry", [wait_for_all, wait_for_room, change_the_budget])
def test_whoever_waits_for_the_disk_waits_for_no_pause(
    hurry: Callable[[BlockTier], None], tmp_path: Path
) -> None:
    """What is written then goes on at once; an end is such a wait too."""
    tier = Resting(open_blocks(tmp_path / "b"))
    tier.write(CHAIN[0], gently=True)
    assert tier.rests.wait(WAIT_S)
    hurry(tier)

    tier.rests.clear()
    tier.write(CHAIN[1], gently=True)
    assert tier.rests.wait(WAIT_S)
    tier.close(timeout_s=WAIT_S)
    assert not any(thread.is_alive() for thread in tier._threads)
