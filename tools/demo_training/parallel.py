"""Work on many texts, shared among processes; the outcome does not depend on how many."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

WORKERS_MAX = 16
SINGLE_BELOW = 32
"""Fewer items than this are not worth a process."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def share_out(
    work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result]:
    """Return one result for each item, in order, by `work` on every n-th item in n processes.

    `work` gives a list as long as what it gets, must be picklable, and runs in this process
    where there are few items or one processor.
    """
    count = min(WORKERS_MAX, len(os.sched_getaffinity(0)))
    if len(items) < SINGLE_BELOW or count == 1:
        return work(items)
    results: list[Result | None] = [None] * len(items)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(work, items[part::count]) for part in range(count)]
        for part, future in enumerate(pending):
            results[part::count] = future.result()
    return [result for result in results if result is not None]
