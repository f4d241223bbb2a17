"""Sends files that are no pictures to a served model, from a process of its own.

Who sends them is not on the server's machine: it takes what others leave of the processors.

ADDRESS MODEL COUNT AT_ONCE; on standard output a JSON list of [field, description], one for each
refusal. It fails where a file is not refused, or for anything but a part of the chat.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from mlxd import Chat, ChatMessage, Client, ContentPart, InvalidRequest
from tests.support.broken_pictures import refused_files

NICE = 19


async def show(client: Client, model: str, content: bytes, media_type: str) -> tuple[str, str]:
    """Show a file; return which field is refused, and why."""
    parts = (ContentPart(image=content, media_type=media_type), ContentPart("what is it?"))
    prompt = Chat((ChatMessage("user", parts=parts),))
    try:
        async with client.generate(prompt, model=model, max_tokens=1) as stream:
            async for _ in stream:
                pass
    except InvalidRequest as error:
        (violation,) = error.violations
        return violation.field, violation.description
    message = "a file that is no picture was read"
    raise AssertionError(message)


async def main() -> None:
    """Send all files."""
    os.nice(NICE)
    address, model, count, at_once = sys.argv[1:]
    left = iter(refused_files(int(count)))
    refusals: list[tuple[str, str]] = []

    async def send(client: Client) -> None:
        for content, media_type in left:
            refusals.append(await show(client, model, content, media_type))

    async with Client(address) as client:
        await asyncio.gather(*(send(client) for _ in range(int(at_once))))
    json.dump(refusals, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
