"""Where a model's chat template comes from.

Sources, first that says it wins
- the template: chat_template.jinja, beside which additional_chat_templates/tool_use.jinja is for
  conversations with tools; tokenizer_config.json's chat_template, a text or a list of named ones,
  of which `tool_use` is for those and `default` for all others; the same in chat_template.json,
  where processors had it before;
- the special tokens that it may write by name (bos_token, ...): tokenizer_config.json,
  special_tokens_map.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from mlxd_models.files.model_config import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.stored_files import StoredFiles
from mlxd_shared.config import CHAT_TEMPLATE_CHARS_MAX
from mlxd_shared.domain.errors import InvalidModel

TEMPLATE_FILE: Final = "chat_template.jinja"
TOOL_FILE: Final = "additional_chat_templates/tool_use.jinja"
PROCESSOR_FILE: Final = "chat_template.json"
FIELD: Final = "chat_template"
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
NAMED_TOKENS: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""The names under which templates know special tokens."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's template, and the one for tools where it has another for them."""

    text: str
    tool_text: str
    special: tuple[tuple[str, str], ...]
    """Special tokens by the names that templates use."""
    file: str = TEMPLATE_FILE
    """Where it was found."""
    tool_file: str = ""
    """Where the one for tools was found; empty: in the same file."""

    def file_of(self, *, with_tools: bool) -> str:
        """Return where the template for a conversation was found."""
        return (self.tool_file if with_tools else "") or self.file


def read_template(source: Source) -> ChatTemplate | None:
    """Return a model's chat template, if it has one.

    Raises:
        InvalidModel: a file that may have it, or names special tokens, is no JSON object or no
            text, or what it has is no template; names file and field.
    """
    files = files_of(source)
    settings = files.read_json(TOKENIZER_CONFIG_FILE)
    special = _special(settings, files.read_json(SPECIAL_TOKENS_FILE))
    text = _text(files, TEMPLATE_FILE)
    if text is not None:
        tools = _text(files, TOOL_FILE)
        if tools is None:
            return ChatTemplate(text, text, special)
        return ChatTemplate(text, tools, special, tool_file=TOOL_FILE)
    for file in (TOKENIZER_CONFIG_FILE, PROCESSOR_FILE):
        named = _templates_by_name(files.read_json(file).get(FIELD), file)
        if named:
            plain = named.get(DEFAULT) or next(iter(named.values()))
            return ChatTemplate(plain, named.get(TOOL_USE, plain), special, file)
    return None


def _text(files: StoredFiles, file: str) -> str | None:
    """Return the text of a template file; None if there is none."""
    raw = files.read(file)
    if raw is None:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidModel(f"not UTF-8: {error}", file) from error
    return _check_length(text.replace("\r\n", "\n").replace("\r", "\n"), file)


def _templates_by_name(value: object, file: str) -> dict[str, str]:
    """Return the templates by name, as a file gives one or several."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: _check_length(value, file, FIELD)}
    templates: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        match item:
            case {"name": str(name), "template": str(text)}:
                templates[name] = _check_length(text, file, FIELD)
            case _:
                problem = "neither a text nor a list of names with their templates"
                raise InvalidModel(problem, file, FIELD)
    return templates


def _check_length(text: str, file: str, field: str = "") -> str:
    if len(text) > CHAT_TEMPLATE_CHARS_MAX:
        problem = f"the chat template is above {CHAT_TEMPLATE_CHARS_MAX} characters"
        raise InvalidModel(problem, file, field)
    return text


def _special(*files: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the named special tokens; invalid ones are not the templates' concern."""
    tokens: dict[str, str] = {}
    for name in NAMED_TOKENS:
        for file in files:
            value = file.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens.setdefault(name, value)
    return tuple(tokens.items())
