"""The threads beside the engine: in order, within bounds, and never waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mlxd_shared.blocks.block_file import HEADER_NBYTES_MAX, Block, Tensor
from mlxd_shared.blocks.policy import READ_ASSUMED_NBYTES_S
from mlxd_worker.cache.disk.tier import BlockTier, Reading
from tests.shared.blocks.made_blocks import chain_of, contents_of, open_blocks

CHAIN = chain_of(5, 6)
IDS = [block.id for block in CHAIN]
NBYTES = sum(block.nbytes for block in CHAIN)
WAIT_S = 60.0


class Watch:
    """Sees each block that a thread has read, and may hold the thread there."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fault: Exception | None = None

    def __call__(self, block: Block) -> None:
        """Note a block, on the reading thread."""
        if self.fault is not None:
            raise self.fault
        self.seen.append(block.depth)
        self.entered.set()
        assert self.go_on.wait(WAIT_S)


MakeTier = Callable[..., BlockTier]


@pytest.fixture
def watch() -> Watch:
    """What the reading thread goes through."""
    return Watch()


@pytest.fixture
def make_tier(tmp_path: Path, watch: Watch) -> Iterator[MakeTier]:
    """Make tiers on one folder; each is closed at the end, or by the test."""
    tiers: list[BlockTier] = []

    def make(**options: Any) -> BlockTier:
        store = open_blocks(tmp_path / "b", check=watch)
        tiers.append(BlockTier(store, **options))
        return tiers[-1]

    yield make
    watch.go_on.set()
    for tier in tiers:
        tier.close(timeout_s=WAIT_S)


def write_all(tier: BlockTier) -> None:
    """Have the whole chain written."""
    for block in CHAIN:
        tier.write(block)
    assert tier.flush(timeout_s=WAIT_S)


def take_all(tier: BlockTier, reading: Reading) -> list[Block]:
    """Take blocks until no more come."""
    taken = []
    while not tier.is_over(reading):
        block = tier.take(reading)
        if block is None:
            tier.wait()
        else:
            taken.append(block)
    return taken


def test_blocks_come_in_order(make_tier: MakeTier) -> None:
    """What was written is read in the order that is wanted, bit for bit; rates are known then."""
    tier = make_tier()
    assert tier.rates(0.5).read_nbytes_s == READ_ASSUMED_NBYTES_S
    write_all(tier)
    assert tier.rates(0.5).token_s == 0.5
    assert tier.rates(0.5).read_nbytes_s != READ_ASSUMED_NBYTES_S, "as fast as it was written"

    taken = take_all(tier, tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S))

    assert [block.id for block in taken] == IDS
    assert [contents_of(block) for block in taken] == [contents_of(block) for block in CHAIN]


def test_a_reading_ends_where_a_block_is_missing(make_tier: MakeTier) -> None:
    """What comes behind it is not read: no prompt could use it."""
    tier = make_tier()
    write_all(tier)
    missing = [*IDS[:2], chain_of(9, 1)[0].id, *IDS[3:]]

    taken = take_all(tier, tier.read(missing, nbytes=NBYTES, patience_s=WAIT_S))

    assert [block.id for block in taken] == IDS[:2]


@pytest.mark.parametrize("bound", ["in_flight_nbytes", "read_ahead_nbytes"])
def test_no_more_is_read_than_there_is_room_for(
    make_tier: MakeTier, watch: Watch, bound: str
) -> None:
    """A block beyond either bound, of all readings or of each, waits until one has been taken."""
    tier = make_tier(**{bound: 1})
    write_all(tier)
    reading = tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S)

    for count in range(1, len(IDS) + 1):
        while not reading.arrived:
            tier.wait()
        assert watch.seen == list(range(count))
        assert tier.take(reading) is not None
    assert tier.is_over(reading)


def test_a_full_queue_of_writes_is_said(make_tier: MakeTier, tmp_path: Path) -> None:
    """There is room while less is waiting than the bound, and for one block in any case."""
    tier = make_tier(in_flight_nbytes=2 * CHAIN[0].nbytes)
    assert tier.has_room()
    write_all(tier)

    assert tier.has_room()
    assert not tier.is_writing(IDS[0])
    assert len(list((tmp_path / "b").glob("v*/*.safetensors"))) == len(CHAIN)


def test_what_is_not_wanted_any_more_is_let_go(make_tier: MakeTier, watch: Watch) -> None:
    """Cancelled in the middle of a read: the block at hand is dropped, the next reading served."""
    tier = make_tier(in_flight_nbytes=1)
    write_all(tier)
    watch.go_on.clear()
    given_up = tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S)
    assert watch.entered.wait(WAIT_S)

    tier.cancel(given_up)
    wanted = tier.read(IDS[:2], nbytes=NBYTES, patience_s=WAIT_S)
    watch.go_on.set()

    assert [block.id for block in take_all(tier, wanted)] == IDS[:2]
    assert watch.seen == [0, 0, 1]
    assert tier.take(given_up) is None


def test_what_arrived_and_was_not_taken_gives_its_room_back(make_tier: MakeTier) -> None:
    """A reading that is cancelled with a block in hand leaves room for others."""
    tier = make_tier(in_flight_nbytes=1)
    write_all(tier)
    given_up = tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S)
    while not given_up.arrived:
        tier.wait()

    tier.cancel(given_up)

    assert len(take_all(tier, tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S))) == len(IDS)


def test_a_disk_that_takes_too_long_is_late(make_tier: MakeTier, watch: Watch) -> None:
    """A reading is over then, though not before what has arrived is taken."""
    now_s = 0.0
    tier = make_tier(clock=lambda: now_s, in_flight_nbytes=1)
    write_all(tier)
    reading = tier.read(IDS, nbytes=NBYTES, patience_s=5.0)
    while not reading.arrived:
        tier.wait()
    watch.go_on.clear()
    watch.entered.clear()
    assert tier.take(reading) is not None
    assert watch.entered.wait(WAIT_S)
    assert not tier.is_over(reading)
    now_s = 5.1

    assert tier.is_over(reading)
    other = tier.read(IDS, nbytes=NBYTES, patience_s=5.0)
    assert not tier.is_over(other)
    now_s = 10.3
    assert tier.is_over(other), "it waits for a disk that hangs, though not for its own block"
    watch.go_on.set()


def test_what_waits_for_the_engine_makes_no_disk_late(make_tier: MakeTier) -> None:
    """However long steps are, and whoever is behind others: both have all of their blocks."""
    now_s = 0.0
    tier = make_tier(clock=lambda: now_s, read_ahead_nbytes=1)
    write_all(tier)
    readings = [tier.read(IDS, nbytes=NBYTES, patience_s=5.0) for _ in range(2)]

    for reading in readings:
        for _ in IDS:
            while not reading.arrived:
                tier.wait()
            now_s += 60.0
            assert not tier.is_over(reading)
            assert tier.take(reading) is not None
        assert tier.is_over(reading)


def test_readings_have_turns(make_tier: MakeTier, watch: Watch) -> None:
    """Each has a block that waits for it, whatever the first one does with its own."""
    tier = make_tier(read_ahead_nbytes=1)
    write_all(tier)
    first, second = (tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S) for _ in range(2))
    while not (first.arrived and second.arrived):
        tier.wait()

    assert watch.seen == [0, 0]
    for _ in IDS:
        while not second.arrived:
            tier.wait()
        assert tier.take(second) is not None
    assert tier.is_over(second)
    assert len(first.arrived) == 1


def test_a_reader_that_fails_holds_nobody_up(make_tier: MakeTier, watch: Watch) -> None:
    """A fault of ours: one line, every reading is over, and writing goes on."""
    tier = make_tier()
    write_all(tier)
    watch.fault = RuntimeError("a fault")

    with capture_logs() as logs:
        assert take_all(tier, tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S)) == []
    assert take_all(tier, tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S)) == []
    tier.write(chain_of(6, 1)[0])

    assert [(log["log_level"], log["thread"]) for log in logs] == [("critical", "prefix-reader")]
    assert tier.flush(timeout_s=WAIT_S)
    assert tier.writes


def test_a_writer_that_fails_is_not_waited_for(make_tier: MakeTier) -> None:
    """One line; nothing more is handed over, and what is there is read."""
    tier = make_tier()
    write_all(tier)
    tensor = Tensor("x" * HEADER_NBYTES_MAX, "U8", (1,), b"x")

    with capture_logs() as logs:
        tier.write(replace(chain_of(6, 1)[0], tensors=(tensor,)))
        assert not tier.flush(timeout_s=WAIT_S)

    assert [(log["log_level"], log["thread"]) for log in logs] == [("critical", "prefix-writer")]
    assert not tier.writes
    assert len(take_all(tier, tier.read(IDS, nbytes=NBYTES, patience_s=WAIT_S))) == len(IDS)


def test_a_close_lets_the_next_one_in(make_tier: MakeTier) -> None:
    """What was written is there for whoever opens the folder then; nothing is written after."""
    tier = make_tier()
    write_all(tier)
    tier.close(timeout_s=WAIT_S)
    assert not tier.writes

    again = make_tier()
    assert len(again.store) == len(CHAIN)


def test_a_smaller_budget_is_kept_to_at_once(make_tier: MakeTier) -> None:
    """What is beyond is gone when it is said to be; a larger budget takes more again."""
    tier = make_tier()
    write_all(tier)
    before = tier.store.nbytes
    applied = threading.Event()
    tier.set_budget(before // 2, applied.set)
    assert applied.wait(WAIT_S)
    assert 0 < tier.store.nbytes <= before // 2
    assert tier.store.budget_nbytes == before // 2
    applied.clear()
    tier.set_budget(before, applied.set)
    assert applied.wait(WAIT_S)
    write_all(tier)
    assert tier.store.nbytes == before


def test_an_order_is_answered_once_it_holds(tmp_path: Path) -> None:
    """One that arrives while the one before is carried out waits for its own files to go."""
    late: list[int] = []
    orders: list[int] = []
    done = threading.Event()

    def note() -> None:
        late.append(tier.store.budget_nbytes)
        done.set()

    def clock() -> float:
        if orders:
            tier.set_budget(orders.pop(), note)
        return 0.0

    tier = BlockTier(open_blocks(tmp_path / "b", clock=clock))
    write_all(tier)
    before = tier.store.nbytes
    orders.append(before // 4)
    tier.set_budget(before // 2, lambda: None)
    assert done.wait(WAIT_S)
    tier.close(timeout_s=WAIT_S)
    assert late == [before // 4]


def test_a_tier_that_has_ended_lets_nobody_wait(make_tier: MakeTier) -> None:
    """An order after the end, or one that the end overtakes, is answered all the same."""
    tier = make_tier()
    tier.close(timeout_s=WAIT_S)
    applied = threading.Event()
    tier.set_budget(0, applied.set)
    assert applied.is_set()


def test_the_folder_says_what_a_block_saves(make_tier: MakeTier) -> None:
    """As of the last write: whoever shares room out knows it once the worker has gone."""
    tier = make_tier()
    tier.note_saving(7.5)
    write_all(tier)
    tier.write(chain_of(9, 1)[0])
    assert tier.flush(timeout_s=WAIT_S)
    tier.close(timeout_s=WAIT_S)
    assert make_tier().store.about.block_s == 7.5
