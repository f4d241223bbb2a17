"""What an operator who asked for contents finds in the log of a chat."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc

import pytest
from google.protobuf.json_format import MessageToJson
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mlxd.v1 import inference_pb2 as pb
from mlxd_controller.services.transcript import Transcript, prompt_of
from mlxd_shared import config
from mlxd_shared.wire.intake import Intake, Reader, run_paced
from mlxd_shared.wire.wire_scan import FROM_CLIENTS

TEXTS = st.text(max_size=12)
CHATS = st.builds(
    pb.ChatPrompt,
    messages=st.lists(
        st.builds(
            pb.ChatMessage,
            role=TEXTS,
            content=TEXTS,
            tool_call_id=TEXTS,
            tool_calls=st.lists(st.builds(pb.ToolCall, id=TEXTS, arguments_json=TEXTS), max_size=3),
        ),
        max_size=4,
    ),
    tools_json=st.lists(TEXTS, max_size=3),
    template_variables_json=TEXTS,
    add_generation_prompt=st.none() | st.booleans(),
)
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])


@pytest.mark.asyncio
@pytest.mark.parametrize("wanted", [True, False])
async def test_a_chat_is_logged_whole_or_not_at_all(*, wanted: bool) -> None:
    """The conversation, and everything of the answer: reasoning and calls too."""
    transcript = Transcript(wanted=wanted)
    call = pb.ToolCall(name="f", arguments_json="{}")
    parts = [
        pb.OutputPart(reasoning="hm"),
        pb.OutputPart(index=1, text="ok"),
        pb.OutputPart(index=2, tool_call=call),
    ]
    frame = pb.GenerateResponse(text="ok", parts=parts).SerializeToString()
    with capture_logs() as logged:
        async with transcript.of(pb.GenerateRequest(chat=CHAT)):
            transcript.note_frame(frame)

    assert bool(logged) is wanted
    if wanted:
        assert '"content":"hi"' in logged[0]["prompt"].replace(" ", "")
        assert logged[0]["output"] == "hmokf({})"


@pytest.mark.asyncio
async def test_choices_are_logged_one_behind_the_other() -> None:
    """However their messages come."""
    transcript = Transcript(wanted=True)
    with capture_logs() as logged:
        async with transcript.of(pb.GenerateRequest(text="p")):
            for choice, text in ((1, "c"), (0, "a"), (1, "d"), (0, "b")):
                frame = pb.GenerateResponse(choice=choice, text=text)
                transcript.note_frame(frame.SerializeToString())
    assert logged[0]["output"] == "ab\ncd"


@pytest.mark.asyncio
async def test_what_a_chat_logs_is_bounded() -> None:
    """However long the conversation."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(content="x" * config.LOGGED_CHARS_MAX * 2)])
    with capture_logs() as logged:
        async with Transcript(wanted=True).of(pb.GenerateRequest(chat=chat)):
            pass
    assert len(logged[0]["prompt"]) == config.LOGGED_CHARS_MAX


@given(chat=CHATS, limit=st.integers(1, 200))
def test_what_is_cut_is_the_beginning_of_the_whole(chat: pb.ChatPrompt, limit: int) -> None:
    """To leave out what does not show changes nothing of what does."""
    shown = prompt_of(pb.GenerateRequest(chat=chat), limit)

    assert shown == MessageToJson(chat, indent=None)[:limit]


def test_of_a_large_chat_no_more_is_made_than_shows() -> None:
    """8,192 messages and 1,024 tools, 12 MiB in all: what is made of them is a fraction."""
    messages = [pb.ChatMessage(content="x" * 1400)] * config.CHAT_MESSAGES_MAX
    tools = ["{}" * 200] * config.CHAT_TOOLS_MAX
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, tools_json=tools))
    tracemalloc.start()
    try:
        shown = prompt_of(request, config.LOGGED_CHARS_MAX)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(shown) == config.LOGGED_CHARS_MAX
    assert peak_nbytes < 16 * config.LOGGED_CHARS_MAX < request.ByteSize() / 8


def test_of_an_image_no_byte_is_copied() -> None:
    """Eight MiB of one: it is told to be there, and its type, and what is said behind it."""
    image = pb.ContentPart(image=bytes(config.IMAGE_BYTES_MAX), media_type="image/png")
    message = pb.ChatMessage(parts=[image, pb.ContentPart(text="what?")])
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message]))
    tracemalloc.start()
    try:
        shown = prompt_of(request, config.LOGGED_CHARS_MAX)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    parts = [{"image": "", "mediaType": "image/png"}, {"text": "what?"}]
    assert json.loads(str(shown)) == {"messages": [{"parts": parts}]}
    assert peak_nbytes < config.IMAGE_BYTES_MAX / 8


@pytest.mark.asyncio
async def test_a_large_prompt_is_cut_on_a_thread_for_large_requests() -> None:
    """While those threads are taken it is not cut, and the event loop goes on."""
    request = pb.GenerateRequest(text="x" * 2 * config.INLINE_REQUEST_BYTES_MAX)
    free = threading.Event()

    async def logged_one() -> bool:
        async with Transcript(wanted=True).of(request):
            return free.is_set()

    raw = request.SerializeToString()
    async with Intake().take(raw, Reader(pb.GenerateRequest, FROM_CLIENTS)):
        taken = [
            asyncio.create_task(run_paced(free.wait)) for _ in range(config.REQUEST_THREADS_MAX)
        ]
        entering = asyncio.create_task(logged_one())
        try:
            for _ in range(10):  # turns of the loop, which goes on
                await asyncio.sleep(0)
            assert not entering.done()
        finally:
            free.set()
        assert await entering
        await asyncio.gather(*taken)


@pytest.mark.asyncio
@pytest.mark.parametrize("frame_chars", [7, 1000, 3 * config.LOGGED_CHARS_MAX])
async def test_what_an_answer_logs_is_bounded(frame_chars: int) -> None:
    """However long the answer, and in whatever pieces it comes: its beginning, no more than may be;
    what comes after that is not even parsed."""
    text = "".join(chr(ord("a") + i % 26) for i in range(3 * config.LOGGED_CHARS_MAX))
    transcript = Transcript(wanted=True)
    with capture_logs() as logged:
        async with transcript.of(pb.GenerateRequest(text="p")):
            for begin in range(0, 2 * config.LOGGED_CHARS_MAX, frame_chars):
                piece = text[begin : begin + frame_chars]
                transcript.note_frame(pb.GenerateResponse(text=piece).SerializeToString())
            transcript.note_frame(b"no message")
    assert logged[0]["output"] == text[: config.LOGGED_CHARS_MAX]
