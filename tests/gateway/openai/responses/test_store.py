"""What a store of responses keeps: within its bounds, whole conversations, each for its owner."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_gateway.openai.responses.store import ENTRY_NBYTES, Kept, ResponseStore
from tests.support.effort import examples

COUNT_MAX, AGE_S = 5, 10.0
NBYTES_MAX = COUNT_MAX * ENTRY_NBYTES + 60
OWNERS = ("", "a", "b")

Step = tuple[str, int, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "go on", "get", "delete", "wait")),
        st.integers(0, 12),
        st.sampled_from(OWNERS),
        st.integers(0, 30),
    ),
    max_size=60,
)


def entry_of(name: str, owner: str = "", *, size: int = 0, previous: str = "") -> Kept:
    """Return a response whose texts take `size` bytes."""
    return Kept(name, owner, "demo", b"i" * (size // 2), b"r" * (size - size // 2), previous)


class Plain:
    """The same by a list that is sorted and cut after each step: slow, and plainly right."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, Kept]] = []
        self.turn = 0

    def find(self, name: str, owner: str) -> Kept | None:
        """Return a response of this owner."""
        return next((k for *_, k in self.entries if (k.id, k.owner) == (name, owner)), None)

    def use(self, entry: Kept, now_s: float) -> None:
        """Note a use of a response and of all before it, the earliest last."""
        here: Kept | None = entry
        while here is not None:
            self.turn += 1
            rest = [each for each in self.entries if each[2].id != here.id]
            self.entries = [*rest, (now_s, self.turn, here)]
            before = here.previous_id
            here = next((k for *_, k in self.entries if k.id == before), None)

    def cut(self, now_s: float) -> None:
        """Forget what is too old or too much."""
        self.entries = sorted(each for each in self.entries if now_s - each[0] < AGE_S)
        while len(self.entries) > COUNT_MAX or self.nbytes > NBYTES_MAX:
            self.entries.pop(0)

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return sum(each.nbytes for *_, each in self.entries)


@settings(max_examples=examples(600), deadline=None)
@given(STEPS)
def test_any_course_of_events(steps: list[Step]) -> None:
    """Whatever is put, used and deleted: the bounds hold, and what is kept is what should be."""
    store = ResponseStore(nbytes_max=NBYTES_MAX, count_max=COUNT_MAX, age_s=AGE_S)
    plain, now_s, made = Plain(), 0.0, 0
    deleted: set[str] = set()
    for action, number, owner, size in steps:
        name = str(made - 1 - number)
        if action == "wait":
            now_s += number
        elif action == "get":
            plain.cut(now_s)
            expected = plain.find(name, owner)
            if expected is not None:
                plain.use(expected, now_s)
            assert store.get(name, owner, now_s) == expected
        elif action == "delete":
            plain_has = plain.find(name, owner) is not None
            assert store.delete(name, owner) == plain_has
            if plain_has:
                deleted.add(name)
                plain.entries = [each for each in plain.entries if each[2].id != name]
        else:
            plain.cut(now_s)
            goes_on = action == "go on" and plain.find(name, owner) is not None
            entry = entry_of(str(made), owner, size=size, previous=name if goes_on else "")
            made += 1
            plain.entries.append((now_s, plain.turn, entry))
            plain.use(entry, now_s)
            plain.cut(now_s)
            store.put(entry, now_s)
        assert len(store) <= COUNT_MAX
        assert (store.nbytes, len(store)) == (plain.nbytes, len(plain.entries))
        for *_, each in plain.entries:
            for later, earlier in pairwise((each, *store.before(each))):
                assert later is not None
                assert earlier is not None or later.previous_id in deleted


def test_what_was_used_longest_ago_goes_first() -> None:
    """And a use of a response is one of what it goes on from."""
    store = ResponseStore(count_max=3)
    store.put(entry_of("first"), 0)
    store.put(entry_of("second", previous="first"), 1)
    store.put(entry_of("other"), 2)
    assert store.get("second", "", 3) is not None
    store.put(entry_of("new"), 4)
    assert [store.get(name, "", 5) is not None for name in ("first", "second", "other")] == [
        True,
        True,
        False,
    ]


def test_age_counts_from_the_last_use() -> None:
    """What nobody uses is gone when its time is over, without a request for it."""
    store = ResponseStore(age_s=10)
    store.put(entry_of("used"), 0)
    store.put(entry_of("unused"), 0)
    assert store.get("used", "", 9) is not None
    assert store.get("used", "", 18) is not None
    assert len(store) == 1
    assert store.get("used", "", 28) is None
    assert (len(store), store.nbytes) == (0, 0)


def test_what_is_larger_than_the_store_is_not_kept() -> None:
    """Nothing is left of it."""
    store = ResponseStore(nbytes_max=ENTRY_NBYTES)
    store.put(entry_of("large", size=1), 0)
    assert store.get("large", "", 0) is None
    assert store.nbytes == 0


def test_an_owner_sees_its_own_alone() -> None:
    """To all others it is not there, to read or to delete."""
    store = ResponseStore()
    store.put(entry_of("r", "a"), 0)
    assert store.get("r", "b", 0) is None
    assert not store.delete("r", "b")
    assert store.delete("r", "a")
    assert not store.delete("r", "a")


def test_what_goes_on_from_a_deletion_has_a_gap() -> None:
    """It is still there itself."""
    store = ResponseStore()
    store.put(entry_of("1"), 0)
    store.put(entry_of("2", previous="1"), 0)
    last = entry_of("3", previous="2")
    store.put(last, 0)
    assert [each.id for each in store.before(last) if each is not None] == ["2", "1"]
    store.delete("1", "")
    assert [each and each.id for each in store.before(last)] == ["2", None]
    assert store.get("3", "", 0) == last
