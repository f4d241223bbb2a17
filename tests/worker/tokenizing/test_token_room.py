"""Texts in a process of their own: the same ids, within time and memory, ended when unwanted."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer as RawTokenizer

from mlxd_models.files.chat_template import ChatTemplate
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, QueueFull
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import COMMAND
from mlxd_worker.tokenizing.room import TokenRoom
from tests.worker.chat.test_control_tokens import make_raw
from tests.worker.made_tokenizers import BOS_ID, EOS_ID, byte_fallback, byte_level, with_bos

SMALL_CHILD = (sys.executable, str(Path(__file__).with_name("small_child.py")))
LONG = "once upon a time </s> there was a caf\u00e9 \u65e5\u672c " * 2000
NEVER = ("/nowhere/at/all",)
"""The command of children that must not be started."""


def tokenizer_of(raw: RawTokenizer, *, plain: bool = True) -> Tokenizer:
    return Tokenizer(raw, bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,), is_plain=plain)


def with_parts(**parts: Any) -> Tokenizer:
    """Return a byte-level tokenizer, not plain, with these parts of its own."""
    content = {**json.loads(byte_level().to_str()), **parts}
    return tokenizer_of(RawTokenizer.from_str(json.dumps(content)), plain=False)


@pytest_asyncio.fixture
async def room() -> AsyncIterator[TokenRoom]:
    made_room = TokenRoom()
    yield made_room
    await made_room.close()


def violation(error: InvalidRequest) -> tuple[str, str]:
    (only,) = error.violations
    return only.field, only.description


@pytest.mark.asyncio
@pytest.mark.parametrize("raw", [lambda: with_bos(byte_level()), byte_fallback])
async def test_a_child_finds_the_same(room: TokenRoom, raw: Callable[[], RawTokenizer]) -> None:
    """Ids and texts are those of the tokenizer itself, with BOS and special tokens as asked."""
    tokenizer = tokenizer_of(raw(), plain=False)
    for begin_text in (True, False):
        for parse_special in (True, False):
            ids = await room.encode(
                tokenizer, LONG, field="text", kind="tokenize", begin_text=begin_text,
                parse_special=parse_special,
            )  # fmt: skip
            assert list(ids) == tokenizer.encode(
                LONG, begin_text=begin_text, parse_special=parse_special
            )
    for skip in (True, False):
        text = await room.decode(
            tokenizer, ids, skip_special=skip, field="token_ids", kind="detokenize"
        )
        assert text == tokenizer.decode(list(ids), skip_special=skip)


@pytest.mark.asyncio
async def test_a_long_conversation_has_the_same_tokens(room: TokenRoom) -> None:
    """Control tokens are the template's alone, also where another process finds them."""
    tokenizer = tokenizer_of(make_raw("level"), plain=False)
    chat_format = ChatFormat(ChatTemplate("<|im_start|>", "", ()), tokenizer)
    rendered = "<|im_start|>user\nhi<|im_123end|>" * 3000
    ids = await room.encode_chat(
        tokenizer, rendered, nonce="123", encode=list, steering=chat_format.steering
    )
    assert list(ids) == chat_format.encode(rendered, "123")


@pytest.mark.asyncio
async def test_what_is_too_large_is_refused_before_anybody_looks_at_it() -> None:
    """By characters, by bytes, and for half a character; no process is started for it."""
    room = TokenRoom(command=NEVER)
    tokenizer = tokenizer_of(byte_level())
    refused = [
        ("a" * (config.PROMPT_CHARS_MAX + 1), "at most 8388608 characters"),
        ("\U0001f600" * (config.PROMPT_BYTES_MAX // 4 + 1), "16777220 bytes in UTF-8; at most"),
        ("ab\ud800", "half a character (a lone surrogate) at character 2"),
    ]
    for text, problem in refused:
        with pytest.raises(InvalidRequest) as caught:
            await room.encode(tokenizer, text, field="texts[3]", kind="embed")
        field, description = violation(caught.value)
        assert field == "texts[3]"
        assert description.startswith(problem)
    assert list(await room.encode(tokenizer, "ab", field="text", kind="x")) == tokenizer.encode(
        "ab"
    )


@pytest.mark.asyncio
async def test_a_text_that_takes_too_long_is_its_requests_error() -> None:
    """Each character looks ahead to the text's end, so it takes hours; the next text is served."""
    ahead = {"Regex": "(?=a*[bc])a"}
    slow = {"type": "Split", "pattern": ahead, "behavior": "Isolated", "invert": False}
    tokenizer = with_parts(pre_tokenizer=slow)
    room = TokenRoom(limits_s=(1.0, 1.0))
    try:
        with pytest.raises(InvalidRequest) as caught:
            await room.encode(tokenizer, "a" * 4_000_000, field="text", kind="tokenize")
        assert violation(caught.value) == (
            "text", "takes longer than 1 s to read with the model's tokenizer.json",
        )  # fmt: skip
        room._limits_s = (60.0, 60.0)
        assert await room.encode(tokenizer, "ab", field="text", kind="tokenize")
    finally:
        await room.close()


@pytest.mark.asyncio
@pytest.mark.skipif(sys.platform == "darwin", reason="nothing bounds address space there")
async def test_a_text_that_takes_too_much_memory_is_its_requests_error() -> None:
    """Its child dies of it, at a size that is known, and the next text is served."""
    many = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 200}
    tokenizer = with_parts(normalizer=many)
    room = TokenRoom(command=SMALL_CHILD)
    try:
        with pytest.raises(InvalidRequest) as caught:
            await room.encode(tokenizer, "a" * 1_000_000, field="text", kind="tokenize")
        field, message = violation(caught.value)
        assert (field, "bytes of memory to read with the model's tokenizer.json" in message) == (
            "text", True,
        )  # fmt: skip
        assert len(await room.encode(tokenizer, "b", field="text", kind="x")) == 1
    finally:
        await room.close()


@pytest.mark.asyncio
async def test_a_tokenizer_that_fails_names_its_file(room: TokenRoom) -> None:
    """What the library runs into is the model's matter, in a child as well."""
    broken = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    content = json.loads(byte_level().to_str())
    content["model"] = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[none]"}
    content["normalizer"] = broken
    tokenizer = tokenizer_of(RawTokenizer.from_str(json.dumps(content)), plain=False)
    with pytest.raises(InvalidModel, match="cannot read a text") as caught:
        await room.encode(tokenizer, "yyy", field="text", kind="tokenize")
    assert caught.value.file == "tokenizer.json"


class Held(TokenRoom):
    """A room whose children wait for nothing but their end: they never answer."""

    def __init__(self, *, waiting_max: int) -> None:
        hang = "import threading; threading.Event().wait()"
        super().__init__(command=(sys.executable, "-c", hang), waiting_max=waiting_max)


@pytest.mark.asyncio
async def test_who_leaves_ends_its_work_and_who_is_too_many_is_refused() -> None:
    """A text that is read is given up with its child, one that waits never begins."""
    tokenizer, room = tokenizer_of(byte_level(), plain=False), Held(waiting_max=1)

    def encode_soon(its: Tokenizer = tokenizer) -> asyncio.Task[array[int]]:
        return asyncio.create_task(room.encode(its, LONG, field="text", kind="tokenize"))

    try:
        reading, waits = encode_soon(), encode_soon()
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await encode_soon()
        assert caught.value.queue == "long texts to tokenise"
        waits.cancel()
        await asyncio.wait([waits])
        reading.cancel()
        await asyncio.wait([reading])
        room._command = COMMAND
        last = await encode_soon(
            tokenizer_of(byte_level(), plain=False)
        )  # has the turn of the first
    finally:
        await room.close()
    assert list(last) == tokenizer.encode(LONG)
    assert waits.cancelled()
    assert reading.cancelled()
