"""One client of `seeing`, a process of its own: asks when it is told to, and says when tokens came.

A line of JSON on standard input is a request (`Asked`), whose picture is in a file; a line of JSON
on standard output is what came of it (`Came`). It is ready once it has written `ready`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from mlxd import Chat, ChatMessage, Client, ContentPart, Finished, SamplingOptions

WORDS = "what is it?"
READY = "ready"


class Asked(msgspec.Struct):
    """A request: a picture with a question, or so many tokens of text."""

    new: int
    picture: str = ""
    ids: list[int] = []


class Came(msgspec.Struct):
    """What came of it; moments are on the machine's steady clock."""

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    prompt_s: float
    """From the first pass over the prompt to the first token: tower and prefill."""
    completion_s: float


async def ask(client: Client, model: str, request: Asked) -> Came:
    """Ask, and read the stream to its end."""
    prompt: Chat | list[int] = request.ids
    if request.picture:
        content = await asyncio.to_thread(Path(request.picture).read_bytes)
        parts = (ContentPart(image=content), ContentPart(WORDS))
        prompt = Chat((ChatMessage("user", parts=parts),))
    sent_s = time.monotonic()
    first_s, usage, tokens = 0.0, None, 0
    options = SamplingOptions(temperature=0.0)
    async with client.generate(
        prompt, model=model, max_tokens=request.new, sampling=options, ignore_eos=True
    ) as stream:
        async for event in stream:
            first_s = first_s or time.monotonic()
            if isinstance(event, Finished):
                usage, tokens = event.usage, event.usage.completion_tokens
    assert usage is not None
    assert tokens == request.new
    return Came(
        sent_s, first_s, time.monotonic(), usage.prompt_tokens, usage.cached_tokens,
        usage.queue_s, usage.prompt_s, usage.completion_s,
    )  # fmt: skip


async def main() -> None:
    """Answer every line."""
    address, model = sys.argv[1:]
    loop = asyncio.get_running_loop()
    async with Client(address) as client:
        await client.healthy()
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            came = await ask(client, model, msgspec.json.decode(line, type=Asked))
            sys.stdout.write(msgspec.json.encode(came).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
