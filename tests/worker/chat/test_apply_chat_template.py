"""Whole conversations, as a client sends them, against `apply_chat_template` of transformers."""

from __future__ import annotations

import functools
import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mlxd_models.files.chat_template import ChatTemplate
from mlxd_shared.domain.chats import Chat, ChatMessage, ToolCall
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.chat.render_process import answer_job
from mlxd_worker.text.tokenizer import Tokenizer
from tests.worker.chat.conversations import CLOCK, SIMPLE
from tests.worker.chat.test_control_tokens import make_raw
from tests.worker.chat.test_templates import NAMES, SPECIAL, TOKENIZERS, template_of
from tests.worker.made_tokenizers import BOS_ID, EOS_ID

HI = ChatMessage("user", "Hi")
TOOLS = (json.dumps(SIMPLE), json.dumps(CLOCK))
LOOK = ToolCall("look", '{"at": "richness"}', "abc123def")
NOW = ToolCall("now", "{}", "ghi456jkl")
SEEN = ChatMessage("tool", "blue", tool_call_id="abc123def", name="look")
NOON = ChatMessage("tool", "12:00", tool_call_id="ghi456jkl", name="now")
CALLS = ChatMessage("assistant", tool_calls=(LOOK,))
SAYS = ChatMessage("assistant", "I look.", tool_calls=(LOOK,))
BOTH = ChatMessage("assistant", tool_calls=(LOOK, NOW))
THINKS = ChatMessage("assistant", reasoning="A tool.", tool_calls=(LOOK,))
SYSTEM = ChatMessage("system", "Be terse.")
NICE = ChatMessage("assistant", "Nice.")
CHATS = {
    "plain": Chat((HI,)),
    "turns": Chat((HI, ChatMessage("assistant", "Hello!"), ChatMessage("user", "More"))),
    "system": Chat((SYSTEM, HI)),
    "system in the middle": Chat((HI, NICE, SYSTEM, HI)),
    "reasoning": Chat((HI, replace(NICE, reasoning="Hm."), HI)),
    "goes on": Chat((HI, ChatMessage("assistant", "The answer")), continue_final_message=True),
    "tools": Chat((SYSTEM, HI), TOOLS),
    "call with content": Chat((HI, SAYS, SEEN), TOOLS),
    "call": Chat((HI, CALLS, SEEN), TOOLS),
    "call is last": Chat((HI, CALLS), TOOLS, add_generation_prompt=False),
    "call without tools": Chat((HI, CALLS, SEEN)),
    "call long ago": Chat((SYSTEM, HI, CALLS, SEEN, NICE, HI), TOOLS),
    "two calls": Chat((HI, BOTH, SEEN, NOON), TOOLS),
    "two calls in turn": Chat((HI, CALLS, SEEN, SAYS, SEEN), TOOLS),
    "call after reasoning": Chat((HI, THINKS, SEEN), TOOLS),
    "goes on after a call": Chat((HI, CALLS, SEEN, NICE), TOOLS, continue_final_message=True),
}


def render_ours(template: str, chat: Chat) -> str | None:
    """Return what we make of a conversation; None where we refuse it, with a typed error."""
    job = chat_format(template).job(replace(chat, now_s=time.time()))
    request_job = {
        "template": job.template,
        "variables": json.loads(json.dumps(job.variables)),
        "now_s": job.now_s,
        "continues": job.continues,
    }
    outcome = answer_job(request_job)
    if "text" not in outcome:
        return None
    text: str = outcome["text"]
    return text.replace(job.nonce, "")


@functools.lru_cache(maxsize=2)
def chat_format(template: str) -> ChatFormat:
    tokenizer = Tokenizer(make_raw("level"), bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    return ChatFormat(ChatTemplate(template, template, tuple(SPECIAL.items())), tokenizer)


@functools.cache
def hugging() -> Any:
    """Return a tokenizer of the reference, which only lends its special tokens' names."""
    made_one: Any = PreTrainedTokenizerFast
    return made_one(tokenizer_object=make_raw("level"), **SPECIAL)


def references(template: str, chat: Chat, *, filler: str | None = None) -> list[str]:
    """Return the reference's texts of a conversation, of whichever form of its calls it takes.

    Objects before text, no content before an empty one. filler: what stands for a missing one.
    """
    contents = ({}, {"content": ""}) if filler is None else ({"content": filler},)
    texts = []
    for as_text, missing in itertools.product((False, True), contents):
        messages = [message_of(message, missing, as_text=as_text) for message in chat.messages]
        try:
            text = hugging().apply_chat_template(
                messages,
                tools=[json.loads(tool) for tool in chat.tools_json] or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=chat.begins_answer,
                continue_final_message=chat.continues,
            )
        except Exception:  # noqa: BLE001 - a form that it does not take, or none that it does
            continue
        texts.append(text)
    return texts


def message_of(message: ChatMessage, missing: dict[str, str], *, as_text: bool) -> dict[str, Any]:
    """Return a message as users of the reference write it."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        if not message.content:
            written = {"role": message.role, **missing}
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments_json
                    if as_text
                    else json.loads(call.arguments_json),
                },
            }
            for call in message.tool_calls
        ]
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.role == "tool":
        written |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return written


NOTHINGS = ("none", "null", "undefined")
NONE_ALONE = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "deepseek-r1-distill-qwen-14b.jinja",
}
"""Their calls are written where content is None, which the reference takes out of messages: from
it they get a prompt without the call, or an error. From us they get None, and the call is there.
"""


def shows(text: str) -> bool:
    """Return whether the arguments of calls are in a prompt as they are meant."""
    return "richness" in text and "{'at'" not in text and '\\"at' not in text


def nothings(text: str) -> int:
    return sum(text.lower().count(word) for word in NOTHINGS)


@pytest.mark.parametrize("name", [*NAMES, *TOKENIZERS])
def test_every_conversation_is_rendered_as_the_reference_does(name: str) -> None:
    """The same text, or refused by both; calls are shown where any form has the template show them;
    nothing is written for content that is missing.
    """
    template = template_of(name)
    compared = 0
    for kind, chat in CHATS.items():
        ours, theirs = render_ours(template, chat), references(template, chat)
        alone = any(m.tool_calls and not m.content for m in chat.messages)
        if name in NONE_ALONE and alone:
            assert ours is not None, kind
            assert shows(ours), kind
            assert not any(map(shows, theirs)), f"{kind}: no longer an exception"
        else:
            expected = next((text for text in theirs if shows(text)), theirs[0] if theirs else None)
            assert ours == expected, kind
        if ours is not None and alone:
            filled = references(template, chat, filler="x")
            assert not filled or nothings(ours) <= max(map(nothings, filled)), kind
        compared += ours is not None
    assert compared, "some conversation renders"
