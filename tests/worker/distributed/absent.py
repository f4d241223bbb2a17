"""A follower that does not come: one that ends at once, or says that it joins and does not.

`python -m tests.worker.distributed.absent --fd FD ...`: with MLXD_TEST_JOINS in its environment it
says so, and waits for the end of its leader.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

from mlxd_worker.distributed.frames import FrameKind, Wire, WireBroken

if __name__ == "__main__" and "MLXD_TEST_JOINS" in os.environ:
    wire = Wire(socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1])))
    wire.send(FrameKind.JOINING)
    with suppress(WireBroken):
        wire.receive()
