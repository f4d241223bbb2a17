"""Images over HTTP: each API's form becomes the same part, and no address is fetched."""

from __future__ import annotations

import base64
import json
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mlxd import Chat, ChatMessage, ContentPart
from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.anthropic.asks import ask_message
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.endpoints import translate
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fates import refuse
from mlxd_gateway.common.images import image_of_base64, image_of_url, write_data_url
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.ollama.asks import ask_chat as ask_ollama
from mlxd_gateway.ollama.asks import ask_generate
from mlxd_gateway.openai import requests as openai
from mlxd_gateway.openai.asks import ask_chat
from mlxd_shared import config

BYTES = b"\x89PNG and so on"
TEXT = base64.b64encode(BYTES).decode()
URL = f"data:image/png;base64,{TEXT}"
PNG = ContentPart(image=BYTES, media_type="image/png")
BARE = ContentPart(image=BYTES)


def openai_of(url: str, role: str = "user", **more: Any) -> Ask:
    """Return what a chat with a text, an image and a text asks."""
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": "b"},
    ]
    message = {"role": role, "content": content, **more}
    body = {"model": "m", "messages": [message]}
    return ask_chat(msgspec.json.decode(json.dumps(body), type=openai.ChatRequest))


def anthropic_of(source: dict[str, Any]) -> Ask:
    """Return what a user's image beside text, and in a tool's answer, asks."""
    image = {"type": "image", "source": source}
    content = [
        {"type": "tool_result", "tool_use_id": "t", "content": [image]},
        image,
        {"type": "text", "text": "b"},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    request = msgspec.json.decode(json.dumps(body), type=anthropic.MessageRequest)
    refuse(request)
    return ask_message(request)


def messages_of(ask: Ask) -> tuple[ChatMessage, ...]:
    """Return the conversation that is asked."""
    assert isinstance(ask.prompt, Chat)
    return ask.prompt.messages


def test_openais_parts_keep_their_order() -> None:
    """In messages of anybody, because the wire says whose may have them; names of fields lead back
    to the part."""
    parts = (ContentPart("a"), PNG, ContentPart("b"))
    ask = openai_of(URL)
    assert messages_of(ask) == (ChatMessage("user", parts=parts),)
    tool = messages_of(openai_of(URL, "tool", tool_call_id="c"))
    assert tool == (ChatMessage("tool", tool_call_id="c", parts=parts),)
    assert ask.rename("chat.messages[0].parts[1].image") == "messages[0].content[1]"
    for role in ("system", "assistant"):
        assert messages_of(openai_of(URL, role)) == (ChatMessage(role, parts=parts),)


def test_anthropics_blocks_keep_their_order() -> None:
    """A tool's answer has its own; other sources than base64 are refused by their type."""
    source = {"type": "base64", "media_type": "image/png", "data": TEXT}
    ask = anthropic_of(source)
    assert messages_of(ask) == (
        ChatMessage("tool", tool_call_id="t", parts=(PNG,)),
        ChatMessage("user", parts=(PNG, ContentPart("b"))),
    )
    named = {f"chat.messages[{at}].parts[0].{name}": block
             for name in ("image", "media_type")
             for at, block in enumerate(("content[0].content[0]", "content[1]"))}  # fmt: skip
    for field, block in named.items():
        assert ask.rename(field) == f"messages[0].{block}"
    for other, field in (
        ({"type": "url", "url": "https://x"}, "source.url"),
        ({"type": "file", "file_id": "f"}, "source.type"),
    ):
        with pytest.raises(BadField) as caught:
            anthropic_of(other)
        assert caught.value.failure.field == f"messages[0].content[0].content[0].{field}"


def test_ollamas_images_stand_before_their_text() -> None:
    """In chats and completions; none where the list is empty."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a", "images": [TEXT]}]}
    ask = ask_ollama(msgspec.json.decode(json.dumps(body), type=ollama.ChatRequest))
    parts = (BARE, ContentPart("a"))
    assert messages_of(ask) == (ChatMessage("user", parts=parts),)
    assert ask.rename("chat.messages[0].parts[0].image") == "messages[0].images[0]"
    plain = ChatMessage("user", "a")
    for images, said in (([TEXT], ChatMessage("user", parts=parts)), ([], plain)):
        body = {"model": "m", "prompt": "a", "images": images}
        made = ask_generate(msgspec.json.decode(json.dumps(body), type=ollama.GenerateRequest))
        assert messages_of(made) == (said,)
        assert made.rename("chat.messages[0].parts[0].image") == "images[0]"
        assert made.rename("chat.messages[0]") == "prompt"
    led = {"model": "m", "prompt": "a", "images": [TEXT, TEXT], "system": "s"}
    made = ask_generate(msgspec.json.decode(json.dumps(led), type=ollama.GenerateRequest))
    assert made.rename("chat.messages[1].parts[1].image") == "images[1]"
    raw = {"model": "m", "prompt": "a", "images": [TEXT], "raw": True}
    with pytest.raises(BadField):
        ask_generate(msgspec.json.decode(json.dumps(raw), type=ollama.GenerateRequest))


@pytest.mark.parametrize(
    ("url", "words"), [
        ("https://example.org/a.png", "no address is fetched"),
        ("http://127.0.0.1/a.png", "no address is fetched"),
        ("file:///etc/passwd", "no address is fetched"),
        ("data:image/png,plain", "no data URL of an image in base64"),
        ("data:image/png;base64,!!!!", "no base64"),
        ("data:image/png;base64,", "no bytes"),
    ],
)  # fmt: skip
def test_what_is_no_data_url_is_refused_by_name(url: str, words: str) -> None:
    """With the field, and why."""
    with pytest.raises(BadField, match=words) as caught:
        image_of_url(url, "here")
    assert caught.value.failure.field == "here"


def test_a_type_that_says_nothing_is_left_out() -> None:
    """As it is of images that were fetched: the file tells itself."""
    assert image_of_url(write_data_url(BYTES), "x") == BARE


def test_length_is_judged_before_decoding() -> None:
    """What is too long is not decoded: no base64 at all gets the same answer."""
    assert image_of_url(URL.replace("data:", "DATA:"), "x") == PNG
    with pytest.raises(BadField, match=f"at most {config.IMAGE_BYTES_MAX} bytes"):
        image_of_base64("!" * (config.IMAGE_BYTES_MAX * 4 // 3 + 5), "x")


@pytest.mark.asyncio
async def test_long_bodies_are_translated_on_a_thread() -> None:
    """Because decoding megabytes of base64 holds up everybody else's streams; short ones here."""
    threads: list[threading.Thread] = []

    def ask(name: str) -> Ask:
        threads.append(threading.current_thread())
        return Ask(name, "p")

    most = config.HTTP_BODY_HERE_BYTES_MAX
    for nbytes in (most, most + 1):
        request: Any = SimpleNamespace(state=SimpleNamespace(body_nbytes=nbytes))
        assert (await translate(request, ask, "m")).model == "m"
    assert threads[0] is threading.current_thread() is not threads[1]
