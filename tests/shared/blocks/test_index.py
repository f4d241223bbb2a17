"""What a folder holds, by bytes, and which of it goes first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.blocks.block_file import BlockId, Part
from mlxd_shared.blocks.index import PAST_MIN, BlockIndex, Entry, worth
from tests.support.effort import SAME_EACH_TIME, examples

NOW_S = 10_000.0


def entry(
    number: int, *, nbytes: int = 100, last_s: float = 0.0, uses: int = 1, depth: int = 0
) -> Entry:
    """Return a file's entry; the number tells it apart."""
    block = BlockId(number.to_bytes(32, "big"), Part.ENTRIES)
    return Entry(block, depth, nbytes, last_s, uses)


def index_of(*entries: Entry) -> BlockIndex:
    """Return an index of these."""
    index = BlockIndex()
    for each in entries:
        index.add(each)
    return index


@settings(max_examples=examples(200), deadline=None, derandomize=SAME_EACH_TIME)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1000), st.booleans()), max_size=40),
    st.integers(0, 2000),
    st.integers(0, 3000),
)
def test_the_bytes_are_those_of_the_files(
    steps: list[tuple[int, int, bool]], nbytes: int, budget_nbytes: int
) -> None:
    """Whatever was added, replaced, used or dropped; and what is chosen makes room, or is all."""
    index, model = BlockIndex(), dict[int, Entry]()
    for number, size, dropped in steps:
        if dropped:
            index.drop(entry(number).id)
            model.pop(number, None)
        else:
            model[number] = entry(number, nbytes=size)
            index.add(model[number])
            index.use(model[number].id, NOW_S)

    assert index.nbytes == sum(each.nbytes for each in model.values())
    assert {each.id for each in index} == {each.id for each in model.values()}
    victims = index.choose_victims(nbytes, budget_nbytes=budget_nbytes, now_s=NOW_S)
    assert len({each.id for each in victims}) == len(victims)
    left = index.nbytes - sum(each.nbytes for each in victims)
    fits = index.nbytes + nbytes <= budget_nbytes
    assert (not victims) if fits else (left + nbytes <= budget_nbytes or left == 0)


def test_what_was_used_long_ago_goes_first() -> None:
    """Of files of one size; and of one that was used more, only much later."""
    old, new, busy = entry(1, last_s=9_000), entry(2, last_s=9_900), entry(3, last_s=9_000, uses=9)
    index = index_of(new, busy, old)

    order = index.choose_victims(0, budget_nbytes=0, now_s=NOW_S)

    assert order == [old, busy, new]
    assert worth(busy, NOW_S) > worth(old, NOW_S)


def test_large_files_go_before_small_ones() -> None:
    """What a byte saves decides."""
    large, small = entry(1, nbytes=1000), entry(2, nbytes=10)

    assert index_of(small, large).choose_victims(0, budget_nbytes=500, now_s=NOW_S) == [large]


def test_of_equals_the_deepest_goes_first() -> None:
    """A chain that was used as a whole loses its end, not its beginning."""
    chain = [entry(depth, depth=depth) for depth in range(8)]

    victims = index_of(*chain).choose_victims(0, budget_nbytes=500, now_s=NOW_S)

    assert victims == chain[:3:-1]


def test_a_use_is_counted() -> None:
    """It makes a file young again, and never older; one that is not there is no matter."""
    index = index_of(entry(1, last_s=50.0))
    index.use(entry(1).id, 70.0)
    index.use(entry(1).id, 60.0)
    index.use(entry(2).id, 60.0)

    used = index.get(entry(1).id)
    assert used is not None
    assert (used.last_s, used.uses, len(index)) == (70.0, 3, 1)


def test_what_came_back_after_a_pause_stays_for_another_one() -> None:
    """Of two files that were used as often and last at the same time, the one that had come back
    after a longer pause is worth more.
    """
    index = index_of(entry(1), entry(2))
    for number, times_s in ((1, (8_000.0, 9_000.0)), (2, (8_990.0, 9_000.0))):
        for at_s in times_s:
            index.use(entry(number).id, at_s)

    rare, busy = index.get(entry(1).id), index.get(entry(2).id)
    assert rare is not None
    assert busy is not None
    assert (rare.pause_s, busy.pause_s, rare.uses, busy.uses) == (1_000.0, 10.0, 3, 3)
    assert worth(rare, NOW_S) > worth(busy, NOW_S)
    index.use(rare.id, 9_000.5)
    again = index.get(rare.id)
    assert again is not None
    assert again.pause_s == 1_000.0, "two requests at a time are no rhythm"


def test_uses_are_remembered_of_what_went() -> None:
    """A block that is written again, or only now, has the uses that it had without a file."""
    index = index_of(entry(1))
    index.use(entry(1).id, 100.0)
    index.drop(entry(1).id)
    index.use(entry(1).id, 400.0)
    index.use(entry(2).id, 400.0)
    assert (index.nbytes, len(index), index.get(entry(1).id)) == (0, 0, None)

    index.add(entry(1, last_s=500.0))
    index.add(entry(2, last_s=500.0))
    index.add(entry(3, last_s=500.0))

    known = [(each.uses, each.pause_s, each.last_s) for each in index]
    assert known == [(3, 300.0, 500.0), (2, 0.0, 500.0), (1, 0.0, 500.0)]


def test_so_many_pasts_are_remembered_and_no_more() -> None:
    """Those used last: what is said of blocks that are not there is bounded."""
    index = BlockIndex()
    for number in range(PAST_MIN + 2):
        index.use(entry(number).id, 0.0)
    index.use(entry(2).id, 1.0)
    index.use(entry(PAST_MIN + 2).id, 1.0)

    for number in range(PAST_MIN + 3):
        index.add(entry(number))

    fresh = [number for number in range(PAST_MIN + 3) if _uses(index, number) == 1]
    assert fresh == [0, 1, 3]


def _uses(index: BlockIndex, number: int) -> int:
    known = index.get(entry(number).id)
    assert known is not None
    return known.uses
