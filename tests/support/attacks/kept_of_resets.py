"""What calls that are reset leave behind in a server: run as a process, because malloc is one."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import ClassVar

import grpc

from mlxd.v1 import inference_pb2
from mlxd.v1 import inference_pb2_grpc as grpcs
from mlxd_shared.serving.call_tasks import spare_batches
from tests.support.attacks.rapid_reset import STREAMS_PER_CONNECTION, reset_once
from tests.support.attacks.tally import Tally
from tests.support.turns import turn_until

CONNECTIONS, TRIES = 8, 1000
CALLS_WITHOUT_A_FALL, FALL_NBYTES = 50, 4096
PAUSE_S, SECONDS_MAX = 0.002, 60.0


class _Memory(ctypes.Structure):
    """What malloc says of itself (mallinfo2)."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def used_nbytes() -> int:
    """What malloc has handed out and not got back, by any thread; not Python's small objects."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Memory
    gc.collect()
    return int(read().uordblks)


class _Server(grpcs.InferenceServiceServicer):
    """Answers with one message."""

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Send one message."""
        yield inference_pb2.GenerateResponse()


async def ask(stub: grpcs.InferenceServiceAsyncStub) -> None:
    """Make calls until one is answered: where too many wait, gRPC turns calls away."""
    for _ in range(TRIES):
        with suppress(grpc.aio.AioRpcError):
            async for _ in stub.Generate(inference_pb2.GenerateRequest()):
                return
    raise AssertionError("no call was answered")


async def settle(stub: grpcs.InferenceServiceAsyncStub) -> int:
    """Return the bytes used once calls make them no fewer: gRPC's threads free connections late."""
    least_nbytes, calls = used_nbytes(), 0
    while calls < CALLS_WITHOUT_A_FALL:
        await ask(stub)
        now_nbytes = used_nbytes()
        calls = 0 if now_nbytes < least_nbytes - FALL_NBYTES else calls + 1
        least_nbytes = min(least_nbytes, now_nbytes)
    return least_nbytes


async def measure_kept_nbytes() -> float:
    """Return how many bytes a reset call leaves behind in a server of this loop."""
    server = grpc.aio.server()
    grpcs.add_InferenceServiceServicer_to_server(_Server(), server)  # type: ignore[abstract]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: grpcs.InferenceServiceAsyncStub = grpcs.InferenceServiceStub(channel)
        await ask(stub)
        tasks = len(asyncio.all_tasks())

        async def reset(connections: int) -> int:
            for _ in range(connections):
                end_s = time.monotonic() + SECONDS_MAX
                await reset_once(address, Tally(), end_s=end_s, pause_s=PAUSE_S)
            await ask(stub)  # its turn is behind theirs
            await turn_until(lambda: len(asyncio.all_tasks()) <= tasks)
            return await settle(stub)

        before = await reset(2)
        kept_nbytes = await reset(CONNECTIONS) - before
    await server.stop(None)
    return kept_nbytes / (CONNECTIONS * STREAMS_PER_CONNECTION)


async def main() -> None:
    """Print the bytes that a reset call leaves; with `spared`, under the tasks of ours."""
    if sys.argv[1:] == ["spared"]:
        spare_batches(asyncio.get_running_loop())
    sys.stdout.write(f"{await measure_kept_nbytes()}\n")


if __name__ == "__main__":
    asyncio.run(main())
