"""Control tokens come from the template; what people write is text, with the ids of text."""

from __future__ import annotations

import functools
import json
import lzma
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from mlxd_models.files.chat_template import ChatTemplate
from mlxd_shared.config import PROMPT_CHARS_MAX
from mlxd_shared.domain.chats import Chat, ChatMessage, ToolCall
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_worker.chat.format import ChatFormat, ChatPrompt
from mlxd_worker.chat.parsing.pieces import Said, Tools
from mlxd_worker.chat.rendering import render_chat
from mlxd_worker.text.tokenizer import Tokenizer
from tests.real_inputs import real_input
from tests.worker.chat.conversations import Case, plain_cases, tool_cases
from tests.worker.chat.test_templates import SPECIAL, TOKENIZERS, reference, template_of
from tests.worker.made_tokenizers import BOS_ID, EOS_ID, byte_fallback, byte_level, with_bos

CHATML = (
    "{# </think> #}{{ bos_token }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
SPELLED = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>", "</s>", "<|unknown|>"]


@functools.cache
def make_raw(kind: str) -> RawTokenizer:
    """Return a small tokenizer with control tokens, special ones and others."""
    raw = with_bos(byte_level() if kind == "level" else byte_fallback())
    raw.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    raw.add_tokens(
        [
            AddedToken("<think>", special=False, normalized=kind == "fallback"),
            AddedToken("</think>", special=False, rstrip=True),
            AddedToken("   ", special=False),
        ]
    )
    return raw


@functools.cache
def chat_format(kind: str) -> ChatFormat:
    """Return the format of CHATML over a made tokenizer, or that of a real one."""
    if kind in TOKENIZERS:
        template = template_of(kind)
        raw = real_raw(kind)
        special = tuple(SPECIAL.items())
    else:
        template, raw, special = CHATML, make_raw(kind), (("bos_token", "<s>"),)
    tokenizer = Tokenizer(raw, bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    return ChatFormat(ChatTemplate(template, template, special), tokenizer)


@functools.cache
def real_raw(name: str) -> RawTokenizer:
    packed = real_input("tokenizers", name) / "tokenizer.json.xz"
    return RawTokenizer.from_str(lzma.decompress(Path(packed).read_bytes()).decode())


def plainly(raw: RawTokenizer, text: str) -> list[int]:
    """Return the ids of a text in which every spelling of a special token is that token."""
    raw.encode_special_tokens = False
    try:
        ids: list[int] = raw.encode(text, add_special_tokens=False).ids
    finally:
        raw.encode_special_tokens = True
    return ids


def prompt_of(wanted: ChatFormat, chat: Chat) -> ChatPrompt:
    """Return a conversation's prompt; rendered here rather than in a process of its own."""
    job = wanted.job(chat)
    text = render_chat(
        job.template,
        job.variables,
        now_s=job.now_s,
        chars_max=PROMPT_CHARS_MAX,
        continues=job.continues,
    )
    return replace(wanted.prompt(text, job.nonce), ids=tuple(wanted.encode(text, job.nonce)))


def chat_of(case: Case) -> Chat:
    """Return a conversation as a client would send it."""
    messages, tools, options = case
    begun = options["add_generation_prompt"]
    variables = {name: value for name, value in options.items() if name != "add_generation_prompt"}
    return Chat(
        messages=tuple(_message(message) for message in messages),
        tools_json=tuple(map(json.dumps, tools or ())),
        variables_json=json.dumps(variables),
        add_generation_prompt=begun,
        now_s=0.0,
    )


def _message(message: dict[str, Any]) -> ChatMessage:
    calls = tuple(
        ToolCall(c["function"]["name"], json.dumps(c["function"]["arguments"]), c["id"])
        for c in message.get("tool_calls", ())
    )
    return ChatMessage(
        role=message["role"],
        content=message["content"] or "",
        reasoning=message.get("reasoning_content", ""),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id", ""),
        name=message.get("name", ""),
    )


def user(text: str) -> Chat:
    """Return a conversation of one message."""
    return Chat((ChatMessage("user", text),))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_reference_text(name: str) -> None:
    """Where nobody spells a control token, the ids are the tokenizer's own for the whole text."""
    wanted, raw, template = chat_format(name), real_raw(name), template_of(name)
    compared = 0
    for case in [*plain_cases(), *tool_cases(as_text=False)]:
        try:
            prompt = prompt_of(wanted, chat_of(case))
            expected = reference(template, case)
        except Exception:  # noqa: BLE001 - test_templates judges what either refuses
            continue
        assert list(prompt.ids) == plainly(raw, prompt.text)
        if "strftime_now" not in template and not any("tool_calls" in m for m in case[0]):
            assert prompt.text == expected
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("kind", ["level", "fallback"])
@given(
    text=st.text(max_size=40) | st.lists(st.sampled_from(["a ", "<", ">", "|", "   "])).map("".join)
)
def test_ids_of_ordinary_content_are_the_whole_texts(kind: str, text: str) -> None:
    """Edges that could be a part of a control token change no id."""
    prompt = prompt_of(chat_format(kind), user(text))
    if not any(spelling in text for spelling in SPELLED):
        assert list(prompt.ids) == plainly(make_raw(kind), prompt.text)


@pytest.mark.parametrize("kind", ["level", "fallback"])
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from([*SPELLED, "<|im_", "end|>", "<", "think>", "<|IM_END|>", " ", "a"])
        ).map("".join),
        min_size=1,
        max_size=3,
    )
)
def test_no_content_becomes_a_control_token(kind: str, texts: list[str]) -> None:
    """Whatever is spelled, however it is cut, the control tokens are the template's alone."""
    wanted = chat_format(kind)
    control = wanted.control.ids_of(SPELLED)
    assert len(control) == 6

    def count(contents: list[str]) -> list[int]:
        messages = tuple(ChatMessage("user", content) for content in contents)
        chat = Chat(messages, tools_json=(json.dumps({"name": contents[0]}),))
        prompt = prompt_of(wanted, chat)
        assert all(content.strip() in prompt.text for content in contents)
        return [token_id for token_id in prompt.ids if token_id in control]

    assert count(texts) == count(["a"] * len(texts))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_control_token_of_a_real_model_comes_from_content(name: str) -> None:
    """Every control token there is, spelled in content, a tool, a call and an answer, is text."""
    wanted = chat_format(name)
    special = [t.content for t in real_raw(name).get_added_tokens_decoder().values() if t.special]
    control = wanted.control.ids_of([*special, "<think>", "<|user|>"])
    spelled = " ".join(special[:300])

    def count(text: str) -> list[int]:
        chat = Chat((ChatMessage("user", text), ChatMessage("assistant", f"a{text}b")))
        return [i for i in prompt_of(wanted, chat).ids if i in control]

    assert count(spelled) == count("innocent")


def test_an_answer_may_hold_the_marks_of_its_own_model() -> None:
    """What the model has said is read again as it was said; a user's marks are text."""
    wanted = chat_format("level")
    think = wanted.control.ids_of(["</think>"])
    said = "<think>hm</think>yes"
    answer = Chat((ChatMessage("assistant", said),), add_generation_prompt=False)
    conversation = Chat((ChatMessage("user", said),), add_generation_prompt=False)

    assert sum(i in think for i in prompt_of(wanted, answer).ids) == 1
    assert not any(i in think for i in prompt_of(wanted, conversation).ids)


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_bos_comes_once(kind: str) -> None:
    """The template writes it, and the post-processor, which would too, is not asked."""
    prompt = prompt_of(chat_format(kind), user("<s>hello"))

    assert prompt.ids[0] == BOS_ID
    assert prompt.ids.count(BOS_ID) == 1


def test_a_text_full_of_control_tokens_is_read_in_little_time() -> None:
    """It takes as long as other texts: nobody can have the worker busy with one message."""
    begin_s = time.thread_time()
    marked = chat_format("level").control.mark("<s>" * 300_000, "123")
    assert time.thread_time() - begin_s < 5
    assert marked == "<123s>" * 300_000


def test_a_prompt_full_of_control_tokens_is_read_in_little_time() -> None:
    """Also by a tokenizer that takes one of them for text, where it stands."""
    wanted = chat_format("fallback")
    rendered = "<|im_start|>x<|im_end|>\n" * 16_000 + "<|im_start|>assistant\n<think>"
    begin_s = time.thread_time()
    ids = wanted.encode(rendered, "123")
    assert time.thread_time() - begin_s < 5
    assert len(ids) > 48_000


def test_a_prompt_that_no_context_holds_is_not_encoded() -> None:
    """What a template makes of little is measured like what people write."""
    template = ChatTemplate("", "", ())
    tokenizer = Tokenizer(make_raw("level"), bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    wanted = ChatFormat(template, tokenizer, chars_max=100)
    assert wanted.prompt(f"{'x' * 100}{'123' * 9}", "123").text == "x" * 100
    with pytest.raises(InvalidRequest) as caught:
        wanted.prompt("x" * 101, "123")
    assert caught.value.violations[0].field == "chat"
    assert "101 characters" in caught.value.violations[0].description


def test_a_mark_at_a_persons_end_opens_no_reasoning() -> None:
    """Only the template, or an answer that goes on, has the model think."""
    chat = Chat((ChatMessage("user", "<think>"),), add_generation_prompt=False)
    template = ChatTemplate("{{ messages[0].content }}{# <think> #}", "", ())
    tokenizer = Tokenizer(make_raw("level"), bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    wanted = ChatFormat(template, tokenizer)
    prompt = prompt_of(wanted, chat)
    assert prompt.text == "<think>"
    parser = wanted.output.parser(Tools(), prompt=prompt.tail)
    assert parser.push("so") == [Said("so")]
    assert chat_format("level").prompt("a<think>\n", "123").tail == "a<think>"


def test_an_added_token_that_is_too_long_is_named() -> None:
    """It is the model's fault, and no search for it is made."""
    raw = byte_level()
    raw.add_tokens([AddedToken("<" * 5000)])
    tokenizer = Tokenizer(raw, bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    with pytest.raises(InvalidModel, match="5000 characters") as caught:
        ChatFormat(ChatTemplate("", "", ()), tokenizer)
    assert caught.value.file == "tokenizer.json"
