"""A client's stream survives its controller: killed in the middle, started again, no token lost."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mlxd import Client, Completion, Delta, Finished, SamplingOptions
from tests.support.cli import LIMIT_S
from tests.support.ports import own_port
from tests.support.served import Served, serve

PROMPT = "Once upon a time"
LENGTHS = (150, 900)
"""Of a stream in tokens: the longer one where the other had ended before its controller did."""


@dataclass(slots=True)
class Consumer:
    """Somebody who reads one stream that reconnects, and says when so many tokens have come."""

    at: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: Finished | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: Client, **options: Any) -> None:
        """Read to the end; offsets leave no gap and repeat nothing."""
        async with client.generate(PROMPT, model="demo", reconnect=True, **options) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    assert event.offset == len(self.token_ids)
                    self.token_ids += event.token_ids
                    self.texts.append(event.text)
                else:
                    self.finished = event
                if len(self.token_ids) >= self.at:
                    self.reached.set()


async def whole(client: Client, **options: Any) -> Completion:
    """The stream that nobody cut."""
    ids: list[int] = []
    texts: list[str] = []
    async with client.generate(PROMPT, model="demo", **options) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return Completion("".join(texts), tuple(ids), event)
            ids += event.token_ids
            texts.append(event.text)
    raise AssertionError("no end")


async def kill(server: Served) -> None:
    """End the controller as if its machine had."""
    server.process.kill()
    await asyncio.wait_for(server.process.wait(), LIMIT_S)


@pytest.fixture(name="run_dir")
def short_folder() -> Iterator[str]:
    """A run directory of the test's own, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        yield folder


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("at", "options", "kept"),
    [
        (1, {"sampling": SamplingOptions(temperature=0.0)}, False),
        (40, {"sampling": SamplingOptions(temperature=1.0, repetition_penalty=1.2)}, False),
        (40, {"sampling": SamplingOptions(temperature=1.0, repetition_penalty=1.2)}, True),
    ],
    ids=["greedy", "seed of the server's own", "the worker is taken over"],
)
async def test_a_controller_is_killed_and_comes_back(
    at: int, options: dict[str, Any], kept: bool, run_dir: str
) -> None:
    """The client goes on with the new one on the same port; ids and text are the whole stream's."""
    folders = (run_dir, run_dir) if kept else (f"{run_dir}/a", f"{run_dir}/b")
    for tokens in LENGTHS:
        if await goes_on(folders, at, {**options, "max_tokens": tokens}):
            return
    raise AssertionError("every stream was over before its controller was killed")


async def goes_on(folders: tuple[str, str], at: int, options: dict[str, Any]) -> bool:
    """Kill the controller of a stream of so many tokens; False where it was over by then.

    The second one finds the worker where both have one folder for what they run.
    """
    tokens, kept = options["max_tokens"], len(set(folders)) == 1
    grace = "60s" if kept else "1s"
    own, its = (("--run-dir", folder, "--orphan-grace", grace) for folder in folders)
    options = {"ignore_eos": True, "stop": ["\0 never"], **options}
    consumer = Consumer(at)
    with own_port() as address:
        async with serve(*own, address=address) as first, Client(address) as client:
            reading = asyncio.create_task(consumer.read(client, **options))
            await asyncio.wait_for(consumer.reached.wait(), LIMIT_S)
            await kill(first)
            async with serve(*its, address=address) as second:
                await asyncio.wait_for(reading, LIMIT_S)
                assert consumer.finished is not None
                usage = consumer.finished.usage
                if not usage.calls.lost:
                    return False
                assert second.count("worker adopted") == int(kept)
                assert second.count("loading") == int(not kept)
                sampling = replace(options["sampling"], seed=usage.seed)
                expected = await whole(client, **{**options, "sampling": sampling})

    assert tuple(consumer.token_ids) == expected.token_ids
    assert "".join(consumer.texts) == expected.text
    assert usage.calls.lost == 1
    assert at <= usage.calls.resumed_tokens < tokens
    assert usage.completion_tokens == tokens
    assert usage.prompt_tokens == expected.finished.usage.prompt_tokens
    return True
