"""Which form of an assistant's calls a template is given, and what is said where none fits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxd_models.files.chat_template import TOOL_FILE, ChatTemplate
from mlxd_shared.domain.chats import Chat, ChatMessage, ToolCall
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.chat.call_forms import CallForm, CallForms, Missing, call_forms
from mlxd_worker.chat.format import ChatFormat
from mlxd_worker.chat.render_process import answer_job
from mlxd_worker.chat.trouble import Trouble
from mlxd_worker.text.tokenizer import Tokenizer
from tests.worker.chat.test_control_tokens import make_raw
from tests.worker.made_tokenizers import BOS_ID, EOS_ID

CALL = ChatMessage("assistant", tool_calls=(ToolCall("f", '{"k": "v"}'),))
USER = ChatMessage("user", "hi")
EACH = "{% for message in messages %}[{{ message.role }}:@]{% endfor %}"
CALLS = (
    "{% if message.tool_calls %}{% for c in message.tool_calls %}"
    "<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}{% endif %}"
)
AS_TEXT = "{% for c in message.tool_calls %}<{{ c.function.arguments + '' }}>{% endfor %}"
CONTENTS = {
    "summed up": ("{{ message.content + '' }}", Missing.EMPTY),
    "trimmed": ("{{ message['content'] | trim }}", Missing.NO_KEY),
    "JSON unless text": (
        (
            "{% if message.content is string %}{{ message.content }}"
            "{% else %}{{ message.content | tojson }}{% endif %}"
        ),
        Missing.EMPTY,
    ),
    "if the key is there": (
        "{% if 'content' in message %}<content>{{ message.content }}</content>{% endif %}",
        Missing.NO_KEY,
    ),
    "looked up": ("{{ message.get('content') }}", Missing.EMPTY),
    "of a whole message": (
        "{{ message | tojson }}",
        Missing.NO_KEY,
    ),
    "searched": ("{% if '</x>' in message.content %}x{% endif %}", Missing.NO_KEY),
    "searched strictly": (
        "{% set c = message.content %}{{ c.split('</x>')[-1] }}",
        Missing.EMPTY,
    ),
    "asked for None": (
        "{% if message.content is not none %}{{ message.content }}"
        "{% else %}" + CALLS + "{% endif %}{% if false %}",
        Missing.NONE,
    ),
    "wanted as a text": (
        "{% if message.content is not string %}{{ raise_exception('no text') }}{% endif %}",
        Missing.EMPTY,
    ),
}


def format_of(template: str, tool_template: str | None = None) -> ChatFormat:
    tokenizer = Tokenizer(make_raw("level"), bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))
    tools = template if tool_template is None else tool_template
    file = "" if tool_template is None else TOOL_FILE
    return ChatFormat(ChatTemplate(template, tools, (), tool_file=file), tokenizer)


def outcome_of(template: str, *messages: ChatMessage, **more: Any) -> dict[str, Any]:
    """Return what the process that renders says of a conversation."""
    job = format_of(template).job(Chat(messages, now_s=0.0, **more))
    outcome = answer_job(
        {
            "template": job.template,
            "variables": json.loads(json.dumps(job.variables)),
            "now_s": job.now_s,
            "continues": job.continues,
        }
    )
    return {k: v.replace(job.nonce, "") if isinstance(v, str) else v for k, v in outcome.items()}


@pytest.mark.parametrize("kind", CONTENTS)
def test_missing_content_is_given_as_the_template_takes_it(kind: str) -> None:
    """Without the key where that renders, else empty, else None; and nothing is written for it."""
    written, missing = CONTENTS[kind]
    end = "{% endif %}" if written.endswith("{% if false %}") else ""
    template = EACH.replace("@", written + CALLS + end)

    forms = call_forms(template)
    text = outcome_of(template, USER, CALL)["text"]

    assert forms.alone == CallForm(missing=missing)
    assert "None" not in text
    assert "null" not in text
    assert "<f {" in text


def test_arguments_are_text_where_the_template_wants_text() -> None:
    """Beside content and alone; each message is given the form that suits it."""
    template = EACH.replace("@", "{{ message.content }}" + AS_TEXT)
    says = ChatMessage("assistant", "so", tool_calls=CALL.tool_calls)

    assert call_forms(template) == CallForms(
        CallForm(arguments_as_text=True), CallForm(arguments_as_text=True)
    )
    assert outcome_of(template, USER, CALL, says)["text"].count('<{"k": "v"}>') == 2


def test_a_template_that_renders_no_call_speaks_for_itself() -> None:
    """Its own words about the conversation reach the client, rather than ours about a form."""
    raises = "{% if message.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    template = EACH.replace("@", raises)
    assert outcome_of(template, USER, CALL) == {
        "kind": "refused", "problem": "no calls", "line": None, "field": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("written", "messages", "field", "line"),
    [
        # None of the forms: the first letter of nothing is none, and the key is a must.
        ("{{ message.content[0] + '' }}", (USER, CALL), "messages[1].content", 3),
        # All of the forms write something that nobody has said.
        ("{{ message.get('content') or None }}", (USER, CALL), "messages[1].content", None),
        (
            "{{ 'x' + message.name }}",
            (ChatMessage("user", "a", name="n"), USER),
            "messages[1].name",
            3,
        ),
        (
            "{% if message.role == 'tool' %}{{ message.tool_call_id + 'x' }}{% endif %}",
            (USER, ChatMessage("tool", "t")),
            "messages[1].tool_call_id",
            3,
        ),
        (
            "{% if message.role == 'assistant' %}{{ message.reasoning_content + 'x' }}{% endif %}",
            (USER, ChatMessage("assistant", "t")),
            "messages[1].reasoning",
            3,
        ),
        (
            "{% for c in message.tool_calls or () %}{{ c.function.arguments.k + 1 }}{% endfor %}",
            (USER, CALL),
            "messages[1].tool_calls",
            3,
        ),
        # No message's fault: it fails whatever the message is.
        ("{{ 1 + 'x' }}", (USER,), "", 3),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_line_and_the_field_of_the_message(
    written: str, messages: tuple[ChatMessage, ...], field: str, line: int | None
) -> None:
    """The field is that without which, or with which, the template gets on."""
    template = (
        "{% for message in messages %}\n{% if true %}\n" + written + "{% endif %}{% endfor %}"
    )
    outcome = outcome_of(template, *messages)
    assert (outcome["kind"], outcome["field"], outcome["line"]) == ("fails", field, line)


def test_a_client_is_told_the_file_that_fails() -> None:
    """Of a conversation with tools it is the template for tools, where there is one."""
    wanted = format_of("fine", "{{ messages[0] + 1 }}")
    job = wanted.job(Chat((USER,), tools_json=('{"name": "f"}',)))
    assert job.file == TOOL_FILE
    assert wanted.job(Chat((USER,))).file == "chat_template.jinja"
    outcome = answer_job(
        {"template": job.template, "variables": job.variables, "now_s": 0.0, "continues": False}
    )

    error = Trouble(**outcome).error(job.file, job.nonce)

    assert isinstance(error, InvalidRequest)
    assert error.violations[0].description.startswith(
        f"the model's template cannot render it ({TOOL_FILE}, line 1): TypeError: "
    )
