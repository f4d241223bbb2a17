"""What encryption costs: bytes a second of blocks written and read, with a key and without.

    python -m tests.bench.encrypted_blocks [--folder FOLDER] [--blocks N] [--rounds N]

The same blocks, of 8 MiB in 32 tensors each, by turns in the clear and encrypted, through the store
that a worker has, on one thread. `make` is what a writing thread computes of a block without any
disk (checksum, or encryption); `write` is all of it; `read` is from the system's cache. Seconds are
the thread's own, of a processor, so that neither the disk nor other programs are in them, but all
that the system does for it is. Each figure is the median over rounds. `pause` is by the clock:
how long a second thread, which wants the interpreter all the time, is kept from it while blocks are
read or made, where that is more than 0.1 ms: the engine's thread is such a one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxd_shared.blocks.block_file import Block, Part, Tensor, encode
from mlxd_shared.blocks.folder import open_folder
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.blocks.store import BlockStore
from mlxd_worker.process.interpreter import SWITCH_INTERVAL_S
from tests.bench.report import json_line, machine
from tests.support.disk_keys import secret_of

CLEAR, ENCRYPTED = "clear", "encrypted"
BLOCK_NBYTES, TENSORS = 8 << 20, 32
FILE_NBYTES_MAX = 1 << 26
KEYS = {CLEAR: None, ENCRYPTED: DiskKey(secret_of(1))}
PAUSE_S_MIN = 1e-4
"""Less is what a loop's own turns and the system's clock take."""


@dataclass(slots=True)
class Rates:
    """Of one way: bytes a second by round, and pauses of a neighbour in seconds."""

    make: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)


def blocks_of(count: int, key: DiskKey | None) -> list[Block]:
    """Return blocks that differ in a few bytes, as named under a key."""
    name_key = b"" if key is None else key.name_key
    nbytes = BLOCK_NBYTES // TENSORS
    content = bytes(range(256)) * (nbytes // 256)
    tensors = tuple(Tensor(f"standard.{n}.0", "U8", (nbytes,), content) for n in range(TENSORS))
    return [
        Block(b"f" * 32, b"b" * 32, number.to_bytes(1024, "little"), 0, Part.ENTRIES, tensors,
              name_key)
        for number in range(count)
    ]  # fmt: skip


def made_nbytes(block: Block, key: DiskKey | None) -> int:
    """Make a block's file without writing it; return its length."""
    pieces = encode(block)
    return sum(map(len, pieces if key is None else key.seal(pieces, place="here")))


def rate_of(nbytes: int, work: Callable[[], object]) -> float:
    """Return how many of `nbytes` `work` does in a second of a processor, whoever else runs."""
    started_s = time.thread_time()
    work()
    return nbytes / (time.thread_time() - started_s)


def pauses_beside(work: Callable[[], object]) -> list[float]:
    """Return for how long this thread did not run, each time that it was long, beside `work`."""
    thread = threading.Thread(target=work)
    pauses: list[float] = []
    thread.start()
    last_s = time.perf_counter()
    while thread.is_alive():
        now_s = time.perf_counter()
        if now_s - last_s > PAUSE_S_MIN:
            pauses.append(now_s - last_s)
        last_s = now_s
    return pauses


def measure(folder: Path, *, count: int, rounds: int) -> Iterator[tuple[str, Rates]]:
    """Yield both ways' figures; rounds alternate, so that a machine's mood is in both."""
    rates = {way: Rates() for way in KEYS}
    for number in range(rounds):
        for way, key in KEYS.items():
            chain = blocks_of(count, key)
            total = count * BLOCK_NBYTES
            store = BlockStore(
                open_folder(folder / f"{way}-{number}", b"f" * 32, key=key),
                b"f" * 32,
                budget_nbytes=1 << 40,
                file_nbytes_max=FILE_NBYTES_MAX,
            )
            mine = rates[way]

            def make(chain: Sequence[Block] = chain, key: DiskKey | None = key) -> None:
                for block in chain:
                    made_nbytes(block, key)

            def write(chain: Sequence[Block] = chain, store: BlockStore = store) -> None:
                assert all(store.write(block) for block in chain)

            def read(chain: Sequence[Block] = chain, store: BlockStore = store) -> None:
                assert all(store.read(block.id) is not None for block in chain)

            mine.make.append(rate_of(total, make))
            mine.write.append(rate_of(total, write))
            read()  # the first one finds nothing warm
            mine.read.append(rate_of(total, read))
            mine.pauses += [*pauses_beside(read), *pauses_beside(make)]
            store.set_budget(0)
            store.close()
    yield from rates.items()


def main() -> None:
    """Measure, and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker
    lines = [json_line("machine", **machine())]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for way, rates in measure(Path(folder), count=args.blocks, rounds=args.rounds):
            pauses = sorted(rates.pauses) or [0.0]
            lines.append(
                json_line(
                    "encrypted_blocks",
                    way=way,
                    make_gb_s=statistics.median(rates.make) / 1e9,
                    write_gb_s=statistics.median(rates.write) / 1e9,
                    read_gb_s=statistics.median(rates.read) / 1e9,
                    pauses=len(rates.pauses),
                    pause_p50_ms=1e3 * pauses[len(pauses) // 2],
                    pause_p99_ms=1e3 * pauses[len(pauses) * 99 // 100],
                    pause_max_ms=1e3 * pauses[-1],
                )
            )
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
