"""Streams that are begun and reset at once, over HTTP/2 written by hand: no client library would.

Invariants:
- A connection sends no more than its first window of flow control, so that it never has to wait.
- What the server asks of its peer (settings, pings) is answered; that it goes is no fault.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from mlxd.v1 import inference_pb2
from tests.support.attacks import wire
from tests.support.attacks.hostile import INFERENCE, MODEL
from tests.support.attacks.tally import Tally
from tests.support.overload import wait

STREAMS_PER_CONNECTION = 500
STREAMS_PER_VOLLEY = 50
WINDOW_BYTES = 65_535
CONNECT_S_MAX = 20.0
_REQUEST = wire.grpc_message(
    inference_pb2.GenerateRequest(model=MODEL, text="Once", max_tokens=20).SerializeToString()
)
_HEADERS = wire.headers_block(
    {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"{INFERENCE}Generate",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
)
assert len(_REQUEST) * STREAMS_PER_CONNECTION < WINDOW_BYTES


async def reset_rapidly(address: str, *, seconds: float, at_once: int, pause_s: float) -> Tally:
    """Keep so many connections at it until the time is over; pause between volleys of streams."""
    tally = Tally()
    end_s = time.monotonic() + seconds

    async def keep_on() -> None:
        while time.monotonic() < end_s:
            await reset_once(address, tally, end_s=end_s, pause_s=pause_s)

    await asyncio.gather(*(keep_on() for _ in range(at_once)))
    return tally


async def reset_once(address: str, tally: Tally, *, end_s: float, pause_s: float) -> None:
    """Begin and reset a connection's streams, with a pause between volleys; count what becomes."""
    begin_s = time.monotonic()
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port)), CONNECT_S_MAX
        )
    except OSError:
        tally.count_call("connect", "REFUSED", time.monotonic() - begin_s)
        await wait(pause_s)
        return
    tally.connections_made += 1
    answering = asyncio.create_task(_answer(reader, writer, tally))
    try:
        writer.write(wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0))
        for number in range(STREAMS_PER_CONNECTION):
            writer.write(_begun_and_reset(2 * number + 1))
            tally.count_call("Generate", "RESET", 0.0)
            if number % STREAMS_PER_VOLLEY == STREAMS_PER_VOLLEY - 1:
                await writer.drain()
                await wait(pause_s)
                if answering.done() or time.monotonic() >= end_s:
                    break
    except OSError:
        tally.count_call("connection", "CLOSED", 0.0)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        await answering  # our own end is the end of what there is to read
        tally.connections_closed += 1


def _begun_and_reset(stream: int) -> bytes:
    """Return a whole call, and that nobody wants its answer."""
    return (
        wire.frame(wire.HEADERS, wire.END_HEADERS, stream, _HEADERS)
        + wire.frame(wire.DATA, wire.END_STREAM, stream, _REQUEST)
        + wire.frame(wire.RST_STREAM, 0, stream, wire.CANCEL.to_bytes(4, "big"))
    )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Tally) -> None:
    """Acknowledge what has to be, until the server goes."""
    buffer = bytearray()
    try:
        while received := await reader.read(1 << 16):
            buffer += received
            for kind, flags, payload in wire.parse_frames(buffer):
                if kind == wire.GOAWAY:
                    tally.count_call("connection", "GOAWAY", 0.0)
                    return
                if kind in {wire.SETTINGS, wire.PING} and not flags & wire.ACK:
                    writer.write(
                        wire.frame(kind, wire.ACK, 0, payload if kind == wire.PING else b"")
                    )
    except OSError:
        return
