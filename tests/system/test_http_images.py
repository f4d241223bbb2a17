"""Images over a real gateway, controller and worker, as four APIs' clients send them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.support.gateways import Web, serve_web
from tests.support.seeing import TOKENS, encode_image, picture, write_seeing_model

WORDS = "what is it?"


def base64_of(number: int) -> str:
    """Return a picture's file in base64."""
    return base64.b64encode(encode_image(picture(number))).decode()


async def ask_openai(web: Web, url: str | None) -> tuple[str, int]:
    """Return the answer about an image, and the tokens of the prompt."""
    client = openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0)
    parts: list[Any] = [{"type": "text", "text": WORDS}]
    if url is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    async with client:
        done = await client.chat.completions.create(
            model="sees",
            messages=[{"role": "user", "content": parts}],
            max_tokens=8,
            temperature=0,
        )
    assert done.usage is not None
    return done.choices[0].message.content or "", done.usage.prompt_tokens


async def ask_responses(web: Web, url: str) -> tuple[str, int]:
    """Return the same by OpenAI's Responses, and that what goes on from it is asked with it."""
    client = openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0)
    content: list[Any] = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": WORDS},
    ]
    message: list[Any] = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"model": "sees", "max_output_tokens": 8, "temperature": 0}
    async with client:
        first = await client.responses.create(input=message, **options)
        second = await client.responses.create(
            input="and then?", previous_response_id=first.id, **options
        )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    return first.output_text, first.usage.input_tokens


async def ask_anthropic(web: Web, data: str) -> tuple[str, int]:
    """Return the same by Anthropic's package."""
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    content: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": WORDS}]
    async with anthropic.AsyncAnthropic(base_url=web.url, api_key="none", max_retries=0) as client:
        done = await client.messages.create(
            model="sees",
            max_tokens=8,
            messages=[{"role": "user", "content": content}],
            extra_body={"temperature": 0},
        )
    text = "".join(block.text for block in done.content if block.type == "text")
    usage = done.usage
    cached = usage.cache_read_input_tokens or 0
    return text, usage.input_tokens + cached


async def ask_ollama(web: Web, data: str) -> tuple[str, int]:
    """Return the same as a client of Ollama's sends it."""
    message = {"role": "user", "content": WORDS, "images": [data]}
    options = {"temperature": 0, "num_predict": 8}
    body = {"model": "sees", "messages": [message], "options": options, "stream": False}
    done = (await web.post("/api/chat", body)).json()
    return done["message"]["content"], done["prompt_eval_count"]


@pytest.mark.asyncio
async def test_four_apis_show_the_same_picture(tmp_path: Path) -> None:
    """Alike answers and counts; addresses, and files that are no images, are refused by name."""
    folder = write_seeing_model(tmp_path / "sees")
    async with serve_web("--model", f"sees={folder}") as web:
        known = (await web.post("/api/show", {"model": "sees"})).json()
        assert "vision" in known["capabilities"]
        shown = base64_of(1)
        first = await ask_openai(web, f"data:image/png;base64,{shown}")
        assert await ask_responses(web, f"data:image/png;base64,{shown}") == first
        assert await ask_anthropic(web, shown) == first
        assert await ask_ollama(web, shown) == first
        other = await ask_openai(web, f"data:image/png;base64,{base64_of(2)}")
        assert other[0] != first[0]
        plain = await ask_openai(web, None)
        assert other[1] == first[1] == plain[1] + TOKENS
        for url, words in (
            ("https://example.org/a.png", "no address is fetched"),
            ("data:image/png;base64,aGVsbG8=", "no image that can be read"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask_openai(web, url)
            assert words in str(caught.value)
            assert "messages[0].content[0]" in str(caught.value)
