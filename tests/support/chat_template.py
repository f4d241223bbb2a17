"""A chat template for tests: plain text, the marks of a family, and a look at what it is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
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


def write_bare_demo(folder: Path) -> Path:
    """Write the demo model to `folder` without its chat template; return the folder."""
    shutil.copytree(DEMO, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    del settings["chat_template"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    return folder
