"""Images that keep their shape through real processes: a controller, its worker, and its death."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2
from tests.support.seeing import encode_image, picture
from tests.support.seeing_shapes import places_of, write_shaped_model
from tests.support.struck import Struck, struck_controller
from tests.system.test_images import MADE, hear, request_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALL, WIDE = (31, 40), (80, 24)
CUT = 9
Part = inference_pb2.ContentPart


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="struck")
async def serve_shapes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Struck]:
    """A controller that serves a tiny Qwen2.5-VL."""
    folder = write_shaped_model(tmp_path_factory.mktemp("models") / "sees")
    async with struck_controller(folder) as controller:
        yield controller


def show(number: int, size: tuple[int, int]) -> inference_pb2.ContentPart:
    """Return a part that is a picture of this size."""
    image = picture(number, width=size[0], height=size[1])
    return Part(image=encode_image(image), media_type="image/png")


async def test_a_picture_takes_places_by_its_shape(struck: Struck) -> None:
    """Which the usage counts; it decides the answer, and hits when it is shown again."""
    words = Part(text="what is it?")
    _, least = await hear(struck, request_of([words]))
    answer = {}
    for size in (TALL, WIDE):
        answer[size], usage = await hear(struck, request_of([show(1, size), words]))
        assert usage.prompt_tokens == least.prompt_tokens + places_of(*size)
    assert places_of(*TALL) != places_of(*WIDE)
    assert answer[TALL] != answer[WIDE]
    again, reused = await hear(struck, request_of([show(1, TALL), words]))
    assert again == answer[TALL]
    assert reused.cached_tokens == reused.prompt_tokens - 1


async def test_a_stream_with_shapes_survives_its_worker(struck: Struck) -> None:
    """Killed behind two pictures: a new worker sees them again, and says the rest."""
    request = request_of([show(3, WIDE), Part(text="and"), show(4, TALL), Part(text="differ?")])
    whole, _ = await hear(struck, request)
    assert len(whole) == MADE
    struck.strike(CUT)
    tokens, usage = await hear(struck, request)
    assert usage.migrations == 1
    assert tokens == whole
    await struck.unload()
