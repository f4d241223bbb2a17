"""One attack on a server, as a process of its own that runs when nobody else wants the processor.

    python -m tests.support.attacks.attacker ADDRESS KIND SECONDS AT_ONCE PAUSE_S SCALE SEED

It sends volleys of `AT_ONCE` calls, with a pause between them, until the time is over, and prints
what became of them as one JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

import grpc

from mlxd_shared import config
from tests.support.attacks.fuzz import fuzz
from tests.support.attacks.hostile import (
    Call,
    Calls,
    burst,
    constraints,
    tiny_parts,
    tokenize,
)
from tests.support.attacks.rapid_reset import reset_rapidly
from tests.support.attacks.tally import Tally
from tests.support.overload import wait

KINDS: dict[str, Calls] = {
    "fuzz": fuzz,
    "tiny_parts": tiny_parts,
    "constraints": constraints,
    "burst": burst,
    "tokenize": tokenize,
}
OVERFILLING = {"burst"}
"""Attacks that are none where no bound is reached."""
OVERTIME_S = 30.0
"""What volleys may go on for until a bound is reached: a server may be quicker than its peers."""
RAPID_RESET = "rapid_reset"
NICENESS = 10
CHANNELS = 20
STREAMS_PER_CHANNEL = 100
assert STREAMS_PER_CHANNEL < config.STREAMS_PER_CONNECTION_MAX  # or calls would wait in the client
GRACE_S = 90.0
"""What calls that were begun in time may take: more than any deadline of theirs."""
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


async def send(channel: grpc.aio.Channel, call: Call, tally: Tally) -> None:
    """Send one call; count what becomes of it."""
    begin_s = time.monotonic()
    try:
        async with asyncio.timeout(GRACE_S):
            left = await _read_answer(channel, call)
    except grpc.aio.AioRpcError as error:
        tally.saw_refusal(call.method, error, time.monotonic() - begin_s)
    except TimeoutError:
        tally.count_call(call.method, "HANGS", time.monotonic() - begin_s)
    else:
        tally.count_call(call.method, "LEFT" if left else "OK", time.monotonic() - begin_s)


async def _read_answer(channel: grpc.aio.Channel, call: Call) -> bool:
    """Read the answer; return whether the client went before its end."""
    if not call.streams:
        unary: Any = channel.unary_unary(call.path)  # bytes in, bytes out
        await unary(call.body, timeout=call.deadline_s)
        return False
    begin: Any = channel.unary_stream(call.path)
    stream = begin(call.body, timeout=call.deadline_s)
    received = 0
    async for _ in stream:
        received += 1
        if received >= call.messages_max:
            stream.cancel()
            return True
    return False


async def attack(
    address: str,
    calls: Iterator[Call],
    *,
    seconds: float,
    at_once: int,
    pause_s: float,
    overfills: bool = False,
) -> Tally:
    """Send volleys until the time is over; the first one is sent whatever the time.

    `overfills`: and until the server has been full, for `OVERTIME_S` more at most.
    """
    tally = Tally()
    end_s = time.monotonic() + seconds
    overtime_s = OVERTIME_S if overfills else 0.0
    async with _connect(address, at_once, tally) as channels:
        while True:
            volley = zip(itertools.cycle(channels), itertools.islice(calls, at_once), strict=False)
            await asyncio.gather(*(send(channel, call, tally) for channel, call in volley))
            left_s = end_s - time.monotonic()
            if left_s <= -overtime_s or (left_s <= 0 and tally.queue_full):
                break
            await wait(min(pause_s, max(left_s, 0.0)))
    return tally


@asynccontextmanager
async def _connect(
    address: str, at_once: int, tally: Tally
) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Hold as many connections as it takes for all calls to reach the server; count them."""
    connections = min(at_once, max(CHANNELS, -(-at_once // STREAMS_PER_CHANNEL)))
    channels: list[grpc.aio.Channel] = []
    async with AsyncExitStack() as stack:
        for _ in range(connections):
            channel = grpc.aio.insecure_channel(address, options=OPTIONS)
            channels.append(await stack.enter_async_context(channel))
            await channel.channel_ready()
            tally.connections_made += 1
        yield channels
    closed = [channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in channels]
    tally.connections_closed += sum(closed)


async def run(address: str, kind: str, *rest: str) -> Tally:
    """Run the attack of this kind."""
    seconds, at_once, pause_s, scale, seed = rest
    if kind == RAPID_RESET:
        return await reset_rapidly(
            address, seconds=float(seconds), at_once=int(at_once), pause_s=float(pause_s)
        )
    calls = KINDS[kind](random.Random(seed), float(scale))
    return await attack(
        address,
        calls,
        seconds=float(seconds),
        at_once=int(at_once),
        pause_s=float(pause_s),
        overfills=kind in OVERFILLING,
    )


def main() -> None:
    """Do what the command line says."""
    os.nice(NICENESS)
    sys.stdout.write(json.dumps(asdict(asyncio.run(run(*sys.argv[1:])))))


if __name__ == "__main__":
    main()
