"""The controller's pipes, on the event loop that it runs on."""

from __future__ import annotations

import asyncio
import gc
import os

import uvloop

from mlxd_controller.launcher.child import Pipe

CLOSING_TURNS = 20


async def _give_up_a_reader() -> None:
    pipe = Pipe(*os.pipe())
    reading = asyncio.create_task(pipe.reader())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
    others = [os.pipe() for _ in range(2)]  # one of them may get the number that has become free
    del reading  # what it held is closed when it is collected
    gc.collect()
    for _ in range(CLOSING_TURNS):
        await asyncio.sleep(0)
    for fd in (end for ends in others for end in ends):
        os.fstat(fd)
        os.close(fd)
    try:
        os.write(pipe.write_fd, b"x")
    except BrokenPipeError:
        pass
    else:
        raise AssertionError("the read end is still open")
    pipe.close()


def test_a_reader_given_up_while_it_connects_closes_its_descriptor_once() -> None:
    """Closed twice, its number would be taken from whoever has got it meanwhile."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_give_up_a_reader())
