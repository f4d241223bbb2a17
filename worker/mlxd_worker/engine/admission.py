"""Whether a row may join: its caches must stay within what the load has reserved for all rows.

By construction they do: what is reserved holds every row at full length in arenas of the largest
class, however rows come and go (`arena_sizes.kv_tokens_bound`, `CacheSizes.most_held`), and the row
table opens no arena beyond that. So a stream whose length was checked can always be held some time,
and to go beyond what is reserved is a bug. It ends the loop, by this name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Submit

KV_UNBOUNDED: Final = sys.maxsize
"""Where nothing is reserved, as in an engine that is only tried."""


def count_alike(
    request: Submit, waiting: Iterable[Submit], *, most: int, class_of: Callable[[Submit], int]
) -> int:
    """Return how many of those that `most` free rows are next for are of the request's class.

    It is one of them.
    """
    own = class_of(request)
    others = (other for other in waiting if other is not request)
    return 1 + sum(class_of(other) == own for other in islice(others, most - 1))


class KVOverrun(AssertionError):
    """Rows would hold more than the load has reserved for them."""

    def __init__(self, *, nbytes: int, join_nbytes: int, nbytes_max: int) -> None:
        super().__init__(
            f"a row of {join_nbytes} bytes beside {nbytes} exceeds the {nbytes_max} reserved"
        )


def check_join(
    caches: RowCaches, *, tokens: int, tokens_max: int | None = None, coming: int, nbytes_max: int
) -> None:
    """Make sure that a row of `tokens` tokens may join, `coming` like it being about to.

    tokens_max: what it may become, None if unknown.

    Raises:
        KVOverrun: it would exceed what is reserved.
    """
    nbytes = caches.nbytes
    join_nbytes = caches.join_nbytes(tokens, tokens_max=tokens_max, coming=coming)
    if nbytes + join_nbytes > nbytes_max:
        raise KVOverrun(nbytes=nbytes, join_nbytes=join_nbytes, nbytes_max=nbytes_max)
