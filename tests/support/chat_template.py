"""A chat template for tests: plain text, the marks of a family, and a look at what it is given."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = (
    "{# answers have <think> and <tool_call> #}"
    "{% if show == 'messages' %}{{ raise_exception(messages | tojson) }}"
    "{% elif show == 'tools' %}{{ raise_exception(tools | tojson) }}"
    "{% elif show == 'time' %}{{ raise_exception(strftime_now('%Y')) }}"
    "{% elif show == 'begun' %}{{ raise_exception(add_generation_prompt | tojson) }}{% endif %}"
    "{% for m in messages %}\n[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n[assistant] {% endif %}"
)
ANSWER = '<think>hm</think>ok <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PATTERN = r'<think>hm</think>ok <tool_call>\{"name": "f", "arguments": \{"a": 1\}\}</tool_call>'
"""Has a model say just ANSWER."""


def write_template(folder: Path, template: str = TEMPLATE) -> Path:
    """Give the model in `folder` a chat template; return the folder."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
