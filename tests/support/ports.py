"""A port of this machine that is a test's own, for servers that come to it one after another."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"


@contextmanager
def own_port() -> Iterator[str]:
    """Yield an address that the system gives to nobody; whoever names it may listen there.

    A socket is bound to it and never listens. Elsewhere than on Linux that would keep servers away,
    too: there the address is free again at once, and only likely to stay so.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        address = f"{HOST}:{holder.getsockname()[1]}"
        if sys.platform != "linux":
            holder.close()
        yield address
