"""Chat templates: the text is the reference renderer's, byte for byte."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mlxd_shared.config import PROMPT_CHARS_MAX
from mlxd_worker.chat.environment import Refusal, render
from mlxd_worker.chat.rendering import NotContinued, TemplateFault, render_chat
from tests.real_inputs import REAL_INPUTS, real_input
from tests.worker.chat.conversations import Case, assistant, plain_cases, tool_cases, user

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOKENIZERS = ["gpt-oss", "mistral-v3", "phi-3-mini", "qwen3", "smollm2-135m-instruct"]
NAMES = sorted(path.name for path in (REAL_INPUTS / "templates").glob("*.jinja*"))


def template_of(name: str) -> str:
    """Return a real template: of the collection, or a real tokenizer's own."""
    if name not in TOKENIZERS:
        return real_input("templates", name).read_text(encoding="utf-8")
    folder = real_input("tokenizers", name)
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    text: str = settings["chat_template"]
    return text


def reference(template: str, case: Case, **more: Any) -> str:
    """Return what the reference renderer makes of a conversation."""
    messages, tools, options = case
    variables: dict[str, Any] = {"tools": tools, **SPECIAL, **options, **more}
    texts: Any = render_jinja_template([messages], chat_template=template, **variables)[0]
    text: str = texts[0]
    return text


def with_aliases(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the product gives them: reasoning by both of its names."""
    return [
        {"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m
        for m in messages
    ]


def ours(template: str, case: Case) -> str:
    """Return what our renderer makes of it."""
    messages, tools, options = case
    variables = {
        "documents": None, "tools": tools, **SPECIAL, **options, "messages": with_aliases(messages),
    }  # fmt: skip
    return render(template, variables, now_s=time.time(), chars_max=PROMPT_CHARS_MAX)


@pytest.mark.parametrize("name", [*NAMES, *TOKENIZERS])
def test_a_real_template_renders_as_the_reference_does(name: str) -> None:
    """The same bytes for every conversation, and where the reference refuses one, so do we."""
    template = template_of(name)
    cases = [*plain_cases(), *tool_cases(as_text=False), *tool_cases(as_text=True)]
    rendered = 0
    for case in cases:
        try:
            expected = reference(template, case)
        except Exception as error:  # noqa: BLE001 - whatever it is, we have it too
            with pytest.raises(Exception, match=re.escape(str(error)[:40])):
                ours(template, case)
            continue
        assert ours(template, case) == expected
        rendered += 1
    assert rendered, "some conversation renders"


@pytest.mark.parametrize("name", [*NAMES, *TOKENIZERS])
@pytest.mark.parametrize("last", ["The answer", "The answer is \n"])
def test_a_last_message_goes_on_as_the_reference_has_it(name: str, last: str) -> None:
    """The text ends within the last message, its spacing kept where the template keeps it."""
    template = template_of(name)
    messages = [user("Hi"), assistant(last)]
    options: dict[str, Any] = {"add_generation_prompt": False}
    variables = {"documents": None, "tools": None, **SPECIAL, **options, "messages": messages}
    bounds: dict[str, Any] = {"now_s": time.time(), "chars_max": PROMPT_CHARS_MAX}
    try:
        expected = reference(template, (messages, None, options), continue_final_message=True)
    except Exception:  # noqa: BLE001 - whatever the reference has against it, we have something
        with pytest.raises((NotContinued, TemplateFault, Refusal)):
            render_chat(template, variables, **bounds, continues=True)
        return
    assert render_chat(template, variables, **bounds, continues=True) == expected
