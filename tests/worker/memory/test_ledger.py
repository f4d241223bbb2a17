"""The ledger's sums and pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.cache.base import RowId
from mlxd_worker.memory.ledger import Account, Audit, Ledger, LedgerError
from mlxd_worker.models.base import Batch
from tests.support.mlx_memory import live_nbytes
from tests.worker.tiny import caches_of, config_with, load, write_model


def nbytes_of(ledger: Ledger, account: Account) -> int:
    """Return one account's bytes."""
    return {report.name: report.nbytes for report in ledger.report()}[account]


def total_of(ledger: Ledger) -> int:
    """Return the bytes of all accounts."""
    return sum(report.nbytes for report in ledger.report())


def test_an_account_is_the_sum_of_its_arrays() -> None:
    """Bytes and arrays are counted per account, empty accounts are told too."""
    ledger = Ledger()
    ledger.pin_all(Account.WEIGHTS, {"a": mx.zeros(10), "b": mx.zeros((3, 3))})
    ledger.pin(Account.PREFIX, "a", mx.zeros(5, dtype=mx.bfloat16))

    figures = {report.name: (report.nbytes, report.arrays) for report in ledger.report()}

    assert figures == {
        Account.WEIGHTS: (76, 2),
        Account.KV: (0, 0),
        Account.PREFIX: (10, 1),
        Account.IMAGES: (0, 0),
        Account.DRAFT: (0, 0),
        Account.WORKSPACE: (0, 0),
    }
    assert total_of(ledger) == 86


def test_a_shared_array_counts_once() -> None:
    """One array under two names, or in two accounts, is one buffer."""
    ledger = Ledger()
    array = mx.zeros(10)
    ledger.pin(Account.WEIGHTS, "embedding", array)
    ledger.pin(Account.WEIGHTS, "head", array)
    ledger.pin(Account.DRAFT, "embedding", array)

    assert total_of(ledger) == nbytes_of(ledger, Account.WEIGHTS) == 40


def test_pins_are_counted() -> None:
    """An array stays as long as anybody pins it, and until the next sweep after that."""
    ledger = Ledger()
    array = mx.zeros(10)
    ledger.pin(Account.WEIGHTS, "a", array)
    ledger.pin(Account.WEIGHTS, "a", array)

    ledger.unpin(Account.WEIGHTS, "a")
    ledger.sweep()
    assert total_of(ledger) == 40
    ledger.unpin(Account.WEIGHTS, "a")
    assert total_of(ledger) == 40
    ledger.sweep()
    assert total_of(ledger) == 0


def test_a_pin_below_zero_is_loud() -> None:
    """Unpinning what is not pinned raises, before and after the sweep."""
    ledger = Ledger()
    ledger.pin(Account.KV, "a", mx.zeros(1))
    ledger.unpin(Account.KV, "a")

    with pytest.raises(LedgerError, match="kv/a"):
        ledger.unpin(Account.KV, "a")
    ledger.sweep()
    with pytest.raises(LedgerError, match="kv/a"):
        ledger.unpin(Account.KV, "a")


def test_a_name_is_one_array() -> None:
    """A second array under a pinned name is a bug, and so is a second source."""
    ledger = Ledger()
    ledger.pin(Account.KV, "a", mx.zeros(1))
    source = Shelf({})
    ledger.attach(Account.KV, "a", source)

    with pytest.raises(LedgerError, match="another array"):
        ledger.pin(Account.KV, "a", mx.zeros(1))
    with pytest.raises(LedgerError, match="attached already"):
        ledger.attach(Account.KV, "a", source)
    ledger.detach(Account.KV, "a")
    with pytest.raises(LedgerError, match="not attached"):
        ledger.detach(Account.KV, "a")


class Shelf:
    """A source of arrays that a test fills."""

    def __init__(self, named: dict[str, mx.array]) -> None:
        self.named = named

    def arrays(self) -> Mapping[str, mx.array]:
        """Return what is on it."""
        return self.named


def test_a_tally_is_read_instead_of_the_arrays_and_held_against_them() -> None:
    """A source of very many arrays is not walked at every look, but at every sweep."""
    shelf = Shelf({"a": mx.zeros(2), "b": mx.zeros(3)})
    tally = [(20, 2)]
    ledger = Ledger()
    ledger.attach(Account.PREFIX, "shelf", shelf, tally=lambda: tally[0])

    ledger.sweep()
    report = next(r for r in ledger.report() if r.name == Account.PREFIX)
    assert (report.nbytes, report.arrays) == (20, 2)
    tally[0] = (24, 2)
    assert total_of(ledger) == 24
    with pytest.raises(LedgerError, match="prefix/shelf"):
        ledger.sweep()


VERBS = st.tuples(st.sampled_from(["pin", "unpin", "sweep", "source"]), st.integers(0, 5))


@given(st.lists(VERBS, max_size=60))
def test_the_parts_always_sum(program: list[tuple[str, int]]) -> None:
    """After any program of pins, unpins and sweeps the total is the naive count's."""
    arrays = [mx.zeros(number + 1) for number in range(6)]
    accounts = list(Account)
    ledger = Ledger()
    shelf = Shelf({})
    ledger.attach(Account.KV, "shelf", shelf)
    counts: Counter[int] = Counter()
    kept: set[int] = set()
    for verb, number in program:
        account = accounts[number % len(accounts)]
        if verb == "pin":
            ledger.pin(account, str(number), arrays[number])
            counts[number] += 1
            kept.add(number)
        elif verb == "unpin" and counts[number]:
            ledger.unpin(account, str(number))
            counts[number] -= 1
        elif verb == "unpin":
            with pytest.raises(LedgerError):
                ledger.unpin(account, str(number))
        elif verb == "source":
            shelf.named[str(number)] = arrays[number]
        else:
            ledger.sweep()
            kept = {number for number in kept if counts[number]}
        live = kept | {int(name) for name in shelf.named}
        assert total_of(ledger) == sum(arrays[number].nbytes for number in live)


def test_the_audit_holds_for_a_model_and_its_caches(tmp_path: Path) -> None:
    """Weights and caches account for what MLX has alive, before, during and after rows; a leaked
    array is told to the byte.
    """
    baseline = live_nbytes()
    model = load(write_model(tmp_path, config_with(vocab_size=3000)))
    caches = caches_of(model)
    ledger = Ledger()
    ledger.pin_all(Account.WEIGHTS, model.parameters())
    ledger.attach(Account.KV, "rows", caches)

    def difference(audit: Audit) -> int:
        return abs(audit.unaccounted_nbytes - baseline)

    assert difference(ledger.audit()) < 16 << 10
    for number in range(3):
        caches.join(RowId(number), tokens=300)
        model.forward(Batch.prefill([1, 2, 3], 0, RowId(number)), caches)
        mx.eval(caches.state())
    assert nbytes_of(ledger, Account.KV) == caches.nbytes > 0
    assert difference(ledger.sweep()) < 16 << 10
    leak = mx.zeros(1 << 18)
    mx.eval(leak)
    report = ledger.audit()
    assert abs(report.unaccounted_nbytes - baseline - leak.nbytes) < 16 << 10
    assert not report.holds
    del leak
    for number in range(3):
        caches.leave(RowId(number))
    assert nbytes_of(ledger, Account.KV) == 0
    assert difference(ledger.sweep()) < 16 << 10
