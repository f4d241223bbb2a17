"""Images through real processes: a controller, its worker, and the worker's death."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest, MlxdError
from mlxd_shared.wire.status import from_call
from tests.support.chat_template import write_template
from tests.support.cli import mlxd
from tests.support.effort import spread_evenly
from tests.support.gemma3_cases import MARKS, write_marked_model
from tests.support.random_model import write_dense_model
from tests.support.seeing import (
    LISTS_ALONE,
    TOKENS,
    change_pixel,
    encode_image,
    picture,
    write_seeing_model,
)
from tests.support.served import serve
from tests.support.struck import NAME, Struck, struck_controller

pytestmark = pytest.mark.asyncio(loop_scope="module")
MADE = 24
PLACES = 16
"""Of an image of a tiny Gemma 3."""
CUTS = spread_evenly((1, 9, 17, 23), 2)
Part = inference_pb2.ContentPart


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="struck")
async def serve_seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Struck]:
    """A controller that serves a tiny LLaVA."""
    folder = write_seeing_model(tmp_path_factory.mktemp("models") / "sees")
    async with struck_controller(folder) as controller:
        yield controller


def request_of(
    parts: Sequence[inference_pb2.ContentPart], *, role: str = "user", **fields: Any
) -> inference_pb2.GenerateRequest:
    """Return a request with a message of these parts."""
    before = inference_pb2.ChatMessage(role="user", content="look")
    shown = inference_pb2.ChatMessage(role=role, parts=parts)
    return inference_pb2.GenerateRequest(
        model=NAME,
        chat=inference_pb2.ChatPrompt(messages=[before, shown]),
        sampling=types_pb2.SamplingOptions(temperature=0.8, seed=11),
        max_tokens=MADE,
        ignore_eos=True,
        **fields,
    )


async def hear(
    struck: Struck, request: inference_pb2.GenerateRequest
) -> tuple[list[int], types_pb2.Usage]:
    """Return a stream's tokens, and its usage."""
    messages = [message async for message in struck.inference.Generate(request)]
    return [i for message in messages for i in message.token_ids], messages[-1].usage


async def refusal(struck: Struck, request: inference_pb2.GenerateRequest) -> MlxdError:
    """Return why a request is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hear(struck, request)
    return from_call(caught.value)


def show(number: int) -> inference_pb2.ContentPart:
    """Return a part that is a picture."""
    return Part(image=encode_image(picture(number)), media_type="image/png")


async def test_a_picture_decides_the_answer(struck: Struck) -> None:
    """Of a user or a tool; it takes the places that the usage counts, and hits when shown again."""
    words = Part(text="what is it?")
    first, usage = await hear(struck, request_of([show(1), words]))
    again, reused = await hear(struck, request_of([show(1), words]))
    other, missed = await hear(struck, request_of([show(2), words]))
    plain, least = await hear(struck, request_of([words]))
    assert first == again != other
    assert first != plain
    assert usage.prompt_tokens == least.prompt_tokens + TOKENS
    assert reused.cached_tokens == usage.prompt_tokens - 1
    assert missed.cached_tokens < usage.prompt_tokens - TOKENS
    pixel = Part(image=encode_image(change_pixel(picture(1))))
    _, missed = await hear(struck, request_of([pixel, words]))
    assert missed.cached_tokens < usage.prompt_tokens - TOKENS
    several = request_of([show(1), words], n=3)
    said: dict[int, list[int]] = {}
    async for message in struck.inference.Generate(several):
        said.setdefault(message.choice, []).extend(message.token_ids)
    assert {choice: len(tokens) for choice, tokens in said.items()} == dict.fromkeys(range(3), MADE)
    assert said[0] == first
    _, usage = await hear(struck, request_of([show(1), words, show(2), words], role="tool"))
    assert usage.prompt_tokens > least.prompt_tokens + 2 * TOKENS


async def test_a_stream_with_pictures_survives_its_worker(struck: Struck) -> None:
    """Killed after any of its tokens: a new worker sees the pictures again, and says the rest."""
    request = request_of([show(3), Part(text="and"), show(4), Part(text="differ?")])
    whole, _ = await hear(struck, request)
    assert len(whole) == MADE
    for cut in CUTS:
        struck.strike(cut)
        tokens, usage = await hear(struck, request)
        assert usage.migrations == 1
        assert tokens == whole
        await struck.unload()


async def test_people_write_no_placeholder(struck: Struck) -> None:
    """Its spelling in a text is text, with and without an image beside it."""
    spelled = Part(text="an <image> is <image>")
    tokens, _ = await hear(struck, request_of([spelled]))
    assert len(tokens) == MADE
    _, usage = await hear(struck, request_of([spelled, show(1), Part(text="no")]))
    _, plain = await hear(struck, request_of([spelled, Part(text="no")]))
    assert usage.prompt_tokens < plain.prompt_tokens + 2 * TOKENS


async def test_a_picture_that_no_pass_cuts_is_served(tmp_path: Path) -> None:
    """Of a Gemma 3: it decides the answer, is found again as a whole, and is seen again by another
    worker."""
    words = Part(text="what is it?")
    async with struck_controller(write_marked_model(tmp_path / "marked")) as struck:
        first, usage = await hear(struck, request_of([show(1), words]))
        other, missed = await hear(struck, request_of([show(2), words]))
        again, reused = await hear(struck, request_of([show(1), words]))
        _, least = await hear(struck, request_of([words]))
        assert first == again != other
        assert usage.prompt_tokens >= least.prompt_tokens + PLACES + len(MARKS) - 1
        assert reused.cached_tokens == usage.prompt_tokens - 1
        assert missed.cached_tokens < usage.prompt_tokens - PLACES
        struck.strike(9)
        moved, usage = await hear(struck, request_of([show(1), words]))
        assert (moved, usage.migrations) == (first, 1)


async def test_bounds_are_checked_before_a_model_is_asked(struck: Struck) -> None:
    """Too many, too large, of another's message, of no bytes: each by its field and its number."""
    words, one = Part(text="a"), Part(image=b"x")
    bad = {
        f"at most {config.IMAGES_MAX} images": request_of([one] * (config.IMAGES_MAX + 1)),
        "has no bytes": request_of([Part(image=b""), words]),
        "a message of user or tool": request_of([one], role="system"),
        f"at most {config.IMAGES_BYTES_MAX} bytes of images": request_of(
            [Part(image=bytes(config.IMAGES_BYTES_MAX // 2 + 1))] * 2
        ),
        f"at most {config.IMAGE_BYTES_MAX}": request_of(
            [Part(image=bytes(config.IMAGE_BYTES_MAX + 1))]
        ),
        "no image that can be read": request_of([Part(image=b"GIF89a"), words]),
        "is image/png, and is said to be image/jpeg": request_of(
            [Part(image=encode_image(picture(1)), media_type="image/jpeg"), words]
        ),
    }
    for problem, request in bad.items():
        error = await refusal(struck, request)
        assert isinstance(error, InvalidRequest), error
        assert problem in str(error), error
        assert "chat" in error.violations[0].field
    tokens, _ = await hear(struck, request_of([show(1), words]))
    assert len(tokens) == MADE


async def test_a_template_that_takes_lists_alone_is_given_lists(tmp_path: Path) -> None:
    """Texts of messages without images are not lost where the template writes lists' parts only."""
    folder = write_seeing_model(tmp_path / "sees", tower="siglip", template=LISTS_ALONE)
    async with struck_controller(folder) as controller:
        request = request_of([show(1), Part(text="what?")], echo=True)
        messages = [message async for message in controller.inference.Generate(request)]
    echo = messages[0].prompt.text
    assert echo.startswith("user: look user: <image><image>")
    assert echo.count("<image>") == TOKENS
    assert "what? ASSISTANT:" in echo


async def test_models_that_do_not_see_refuse_images_by_name(tmp_path: Path) -> None:
    """UNIMPLEMENTED, with the field; the same text without it is answered."""
    folder = write_template(write_dense_model(tmp_path / "blind"))
    async with struck_controller(folder) as controller:
        error = await refusal(controller, request_of([Part(text="a"), show(1)]))
        assert isinstance(error, FieldNotServed)
        assert error.field == "chat.messages[1].parts[1].image"
        assert error.why == f"{NAME} does not see images"
        tokens, _ = await hear(controller, request_of([Part(text="a")]))
        assert len(tokens) == MADE


async def test_a_tower_without_settings_is_no_reason_to_refuse_the_text(tmp_path: Path) -> None:
    """Its text is answered; an image is refused by the file that is missing, and named as such."""
    folder = write_seeing_model(tmp_path / "bare")
    (folder / "preprocessor_config.json").unlink()
    async with struck_controller(folder) as controller:
        error = await refusal(controller, request_of([Part(text="a"), show(1)]))
        assert isinstance(error, FieldNotServed)
        assert error.field == "chat.messages[1].parts[1].image"
        assert "preprocessor_config.json is missing" in error.why
        tokens, _ = await hear(controller, request_of([Part(text="a")]))
        assert len(tokens) == MADE


async def test_a_file_is_shown_from_a_shell(tmp_path: Path) -> None:
    """`mlxd run --image` answers about it; what is no image, or no file, is refused in words."""
    folder = write_seeing_model(tmp_path / "sees")
    path, other = tmp_path / "a.png", tmp_path / "b.txt"
    path.write_bytes(encode_image(picture(1)))
    other.write_text("no image")
    async with serve("--model", f"sees={folder}") as server:
        where = ("--address", server.address, "--max-tokens", "5", "--stats")
        ran = await mlxd("run", "sees", "what?", "--image", str(path), *where, piped="")
        assert ran.code == 0, ran.err
        assert "prompt " in ran.err
        bad = await mlxd("run", "sees", "what?", "--image", str(other), *where, piped="")
        assert bad.code != 0
        assert "no image that can be read" in bad.err
        shown = await mlxd("show", "sees", "--address", server.address)
        assert "seen in chats" in shown.out
        gone = await mlxd("run", "sees", "what?", "--image", str(tmp_path), *where, piped="")
        assert gone.code == 2
        assert "--image" in gone.err
