"""Large texts of Tokenize and Detokenize are made and read off the event loop."""

from __future__ import annotations

import sys
import threading
from array import array
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.chats import Chat, ChatMessage
from mlxd_shared.wire.intake import Intake, Reader
from mlxd_shared.wire.wire_scan import FROM_CLIENTS
from mlxd_worker.chat.format import ChatPrompt
from mlxd_worker.front.prompting import prompt_of
from mlxd_worker.servicers.inference import InferenceServicer
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import IDS
from mlxd_worker.tokenizing.room import TokenRoom
from tests.worker.made_tokenizers import byte_level

LARGE_CHARS = config.INLINE_REQUEST_BYTES_MAX + 1
NOBODY: Any = None


class Watched:
    """A request that notes which threads read its text."""

    worker_incarnation = model = ""
    add_special_tokens = parse_special_tokens = False

    def __init__(self, chars: int) -> None:
        """Nobody has read it."""
        self._chars = chars
        self.threads: set[threading.Thread] = set()

    def HasField(self, name: str) -> bool:  # noqa: N802 - protobuf's name
        """Say that each is there."""
        return bool(name)

    @property
    def text(self) -> str:
        """What is to be tokenised."""
        self.threads.add(threading.current_thread())
        return "a" * self._chars


def servicer_over(room: TokenRoom) -> tuple[InferenceServicer, Tokenizer]:
    """Return the methods of a worker that holds a model of any context."""
    tokenizer = Tokenizer(byte_level(), bos_id=None, add_bos=None, eos_ids=())
    loaded = SimpleNamespace(
        tokenizer=tokenizer, vocab_size=1 << 20, context_length=1 << 20,
        job=SimpleNamespace(digest="d"),
    )  # fmt: skip
    worker: Any = SimpleNamespace(tokens=room, check_incarnation=str, check_model=lambda _: loaded)
    return InferenceServicer(worker, NOBODY), tokenizer


@pytest.mark.asyncio
@pytest.mark.parametrize("chars", [100, LARGE_CHARS])
async def test_a_large_text_is_read_off_the_loop(chars: int) -> None:
    """Each time it is looked at: the message makes a text of its bytes anew."""
    room = TokenRoom()
    servicer, _ = servicer_over(room)
    kind = inference_pb2.TokenizeRequest
    request: Any = Watched(chars)
    raw = kind(text=request.text).SerializeToString()
    request.threads.clear()
    async with Intake().take(raw, Reader(kind, FROM_CLIENTS)):
        assert await servicer.Tokenize(request, NOBODY)
    here = threading.current_thread()
    assert request.threads
    assert (here in request.threads) == (chars < LARGE_CHARS)


@pytest.mark.asyncio
@pytest.mark.parametrize("ids", [100, config.TOKENIZE_SHORT_IDS_MAX + 1000])
async def test_a_large_text_is_written_off_the_loop(ids: int) -> None:
    """Neither what a child answered nor the answer to the call is made on the loop's thread."""
    room = TokenRoom()
    servicer, tokenizer = servicer_over(room)
    request = inference_pb2.DetokenizeRequest(token_ids=tokenizer.encode("a") * ids)
    calls: list[str] = []

    def note(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in {"decode", "SerializeToString"}:
            calls.append(called.__name__)

    sys.setprofile(note)
    try:
        answer = await servicer.Detokenize(request, NOBODY)
    finally:
        sys.setprofile(None)
        await room.close()
    assert inference_pb2.DetokenizeResponse.FromString(answer).text == "a" * ids
    assert calls == ([] if ids > 100 else ["SerializeToString"])


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [100, config.TOKENIZE_SHORT_IDS_MAX + 1])
async def test_a_conversations_many_ids_are_checked_off_the_loop(count: int) -> None:
    """A template may make them of a request that is small enough to be read on the loop."""
    chat = Chat((ChatMessage("user", "hello"),), parse_output=False)
    spec: Any = SimpleNamespace(prompt=chat, min_tokens=0)

    class Chats:
        """Renders every conversation alike."""

        async def render(self, *_of: object) -> ChatPrompt:
            """Return many ids."""
            return ChatPrompt(array(IDS, [7]) * count, "")

    worker: Any = SimpleNamespace(chats=Chats(), tokens=None)
    loaded: Any = SimpleNamespace(
        tokenizer=Tokenizer(byte_level(), bos_id=None, add_bos=None, eos_ids=()),
        vocab_size=1 << 20, context_length=1 << 20, chat=object(), sight=None,
    )  # fmt: skip
    calls: list[str] = []

    def note(frame: FrameType, event: str, _called: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_check_ids":
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        prompt = await prompt_of(worker, spec, loaded, "r")
    finally:
        sys.setprofile(None)
    assert prompt.ids == (7,) * count
    assert calls == (["_check_ids"] if count == 100 else [])
