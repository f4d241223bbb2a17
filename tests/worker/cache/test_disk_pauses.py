"""Blocks that are written beside rows: a tensor, then a pause, unless somebody waits for them."""

from __future__ import annotations

from pathlib import Path

from mlxd_shared.blocks.block_file import encode
from mlxd_worker.cache.disk.pauses import SPARE, Pauses
from mlxd_worker.cache.disk.tier import BlockTier
from tests.shared.blocks.made_blocks import chain_of, contents_of, open_blocks

CHAIN = chain_of(3, 6)
WAIT_S = 60.0
AGE_S = 1e6


class Clock:
    """A clock that a test winds, and that may go on by itself each time it is read."""

    def __init__(self, *, steps_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._steps_s = steps_s

    def __call__(self) -> float:
        """Return the time."""
        self.now_s += self._steps_s
        return self.now_s


def test_a_pause_is_by_the_work_before_it() -> None:
    """What is rested is no work: it counts for no rate, and makes no pause longer."""
    clock, rests = Clock(), list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        clock.now_s += seconds

    pauses = Pauses(clock=clock, rest=rest)
    for work_s in (1.0, 3.0):
        clock.now_s += work_s
        pauses()

    assert rests == [SPARE * 1.0, SPARE * 3.0]
    assert pauses.rested_s == sum(rests)
    assert clock.now_s - pauses.rested_s == 4.0


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


def test_whoever_waits_for_the_disk_waits_for_no_pause(tmp_path: Path) -> None:
    """On this clock each would take a month: a flush, a budget and an end let them be left out."""
    store = open_blocks(tmp_path / "b")
    tier = BlockTier(store, clock=Clock(steps_s=AGE_S))
    for block in CHAIN:
        tier.write(block, gently=True)
    assert tier.flush(timeout_s=WAIT_S)
    assert all(store.nbytes_of(block.id) for block in CHAIN)

    tier.write(chain_of(4, 6)[3], gently=True)
    tier.close(timeout_s=WAIT_S)
    assert not any(thread.is_alive() for thread in tier._threads)
