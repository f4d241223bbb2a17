"""A worker that is killed at any token of streams over pictures: their clients hear the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from mlxd.v1 import inference_pb2, types_pb2
from tests.support.killed_streams import Heard, hear
from tests.support.seeing import encode_image, picture
from tests.support.seeing_models import SEEING
from tests.support.struck import NAME, Struck, struck_controller

TOKENS = 41
OFFSETS = range(TOKENS)
TRIES = 5
"""A machine that stalls makes a new worker's first chat or image late, which is refused."""
Part = inference_pb2.ContentPart
Message = inference_pb2.ChatMessage


def show(number: int, *, width: int, height: int) -> inference_pb2.ContentPart:
    """Return a part that is a picture."""
    return Part(image=encode_image(picture(number, width=width, height=height)))


def request_of(*messages: inference_pb2.ChatMessage, **sampling: Any) -> (
    inference_pb2.GenerateRequest
):  # fmt: skip
    """Return a request over a conversation."""
    return inference_pb2.GenerateRequest(
        model=NAME,
        chat=inference_pb2.ChatPrompt(messages=messages),
        sampling=types_pb2.SamplingOptions(**sampling),
        max_tokens=TOKENS,
        ignore_eos=True,
    )


TALL, WIDE = show(1, width=31, height=40), show(2, width=80, height=24)
WORDS = Part(text="what is it?")
REQUESTS = (
    request_of(
        Message(role="user", parts=[TALL, Part(text="and"), WIDE, Part(text="differ?")]),
        temperature=0.8, seed=11,
    ),
    request_of(
        Message(role="user", parts=[WIDE, WORDS]),
        Message(role="assistant", content="a wide one"),
        Message(role="user", parts=[WORDS, TALL, Part(text="?")]),
        temperature=0.0,
    ),
    request_of(Message(role="user", parts=[WORDS]), temperature=0.9, seed=5),
)  # fmt: skip
"""Two pictures and a drawn answer; pictures of two turns, greedy; text beside them."""


async def kill(struck: Struck, offset: int) -> list[Heard]:
    """Return what is heard where the worker dies once all streams have so many tokens."""
    for _ in range(TRIES):
        blow = struck.strike(offset, streams=len(REQUESTS))
        calls = (hear(struck, each, blow=blow) for each in REQUESTS)
        results = await asyncio.gather(*calls, return_exceptions=True)
        late = [each for each in results if isinstance(each, grpc.aio.AioRpcError)]
        if not late:
            break
        assert all("takes longer than" in (each.details() or "") for each in late), late
        await struck.unload()
    assert blow.held == len(REQUESTS)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if isinstance(each, Heard)]


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", SEEING)
async def test_streams_over_pictures_go_on_from_every_offset(family: str, tmp_path: Path) -> None:
    """Ids, text and end as undisturbed, whichever token was the last, with text beside them."""
    folder = SEEING[family](tmp_path / family)
    async with struck_controller(folder) as struck:
        whole = [await hear(struck, request) for request in REQUESTS]
        assert all(len(each.ids) == TOKENS for each in whole)
        for offset in OFFSETS:
            for before, after in zip(whole, await kill(struck, offset), strict=True):
                assert after.last is not None
                assert after.last.usage.migrations == (1 if offset else 0)
                assert after.ids == before.ids, offset
                assert (after.text, after.end) == (before.text, before.end), offset
            if offset % 2:
                await struck.unload()
