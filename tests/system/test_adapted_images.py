"""Images through mlx-vlm and real processes: a controller, its worker, and the worker's death."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd.v1 import inference_pb2, types_pb2
from tests.support.seeing import encode_image, picture
from tests.support.struck import NAME, Struck, struck_controller
from tests.worker.vlm import CASES, write_served

MADE = 16


def request_of(number: int) -> inference_pb2.GenerateRequest:
    """Return a request that shows a picture."""
    part = inference_pb2.ContentPart
    parts = [part(image=encode_image(picture(number))), part(text="what is it?")]
    return inference_pb2.GenerateRequest(
        model=NAME,
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", parts=parts)]
        ),
        sampling=types_pb2.SamplingOptions(temperature=0.8, seed=11),
        max_tokens=MADE,
        ignore_eos=True,
    )


async def hear(struck: Struck, number: int) -> tuple[list[int], types_pb2.Usage]:
    """Return a stream's tokens, and its usage."""
    messages = [message async for message in struck.inference.Generate(request_of(number))]
    return [i for message in messages for i in message.token_ids], messages[-1].usage


@pytest.mark.asyncio
async def test_a_picture_decides_and_survives_its_worker(tmp_path: Path) -> None:
    """It takes a token for each place, hits when shown again, and is seen again in a new worker."""
    folder = write_served(tmp_path / "sees", CASES[0])
    async with struck_controller(folder) as struck:
        first, usage = await hear(struck, 1)
        again, reused = await hear(struck, 1)
        other, missed = await hear(struck, 2)
        assert len(first) == MADE
        assert first == again != other
        assert reused.cached_tokens == usage.prompt_tokens - 1
        assert missed.cached_tokens < usage.prompt_tokens - 20  # 31 x 40 pixels: 4 x 5 places
        struck.strike(7)
        tokens, usage = await hear(struck, 1)
        assert (tokens, usage.migrations) == (first, 1)
