"""A server that does nothing but say that it is well: what the machine itself takes for an answer.

    python -m tests.support.bare_server

Prints its address, and serves until its standard input ends. Beside a server under load it tells
what part of an answer's time is the load's, on processors that all are busy.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2_grpc


async def serve() -> None:
    """Serve on a free port of this machine until standard input ends."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve())
