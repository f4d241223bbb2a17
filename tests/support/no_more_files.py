"""A process that may open no file."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_STREAMS = 3


@contextmanager
def no_more_files() -> Iterator[None]:
    """Refuse this process every open file but its standard streams, which stay open.

    The limit is no number that may become free: what earlier tests left open is closed at any
    moment, by a collection or a thread, and whoever opens a file next would then get its number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_STREAMS, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
