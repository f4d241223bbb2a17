"""Where chat templates are found, in what order, and what is wrong with them by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxd_models.files.chat_template import read_template
from mlxd_shared.config import CHAT_TEMPLATE_CHARS_MAX
from mlxd_shared.domain.errors import InvalidModel

NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


def folder_of(place: Path, **files: str) -> Path:
    """Write files; a `__` in a keyword is the point of a suffix, a `___` the end of a folder."""
    for name, text in files.items():
        path = place / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    return place


def find_template(place: Path, **files: str) -> tuple[str, str, str] | None:
    template = read_template(folder_of(place, **files))
    return None if template is None else (template.text, template.tool_text, template.file)


def test_the_first_file_that_has_one_says_it(tmp_path: Path) -> None:
    """The file of its own, the tokenizer's settings, then what processors had before."""
    assert find_template(tmp_path) is None
    processor = json.dumps({"chat_template": "p"})
    assert find_template(tmp_path, chat_template__json=processor) == (
        "p",
        "p",
        "chat_template.json",
    )
    settings = json.dumps({"chat_template": NAMED})
    assert find_template(tmp_path, tokenizer_config__json=settings) == (
        "d",
        "t",
        "tokenizer_config.json",
    )
    assert find_template(tmp_path, chat_template__jinja="a\r\nb") == (
        "a\nb",
        "a\nb",
        "chat_template.jinja",
    )
    extra = {"additional_chat_templates___tool_use__jinja": "u"}
    assert find_template(tmp_path, **extra) == ("a\nb", "u", "chat_template.jinja")


@pytest.mark.parametrize(
    ("name", "text", "file"),
    [
        ("chat_template__json", '{"chat_template": 1}', "chat_template.json"),
        ("chat_template__json", "[]", "chat_template.json"),
        ("tokenizer_config__json", '{"chat_template": [{"name": "a"}]}', "tokenizer_config.json"),
        ("chat_template__jinja", "x" * (CHAT_TEMPLATE_CHARS_MAX + 1), "chat_template.jinja"),
        (
            "chat_template__json",
            json.dumps({"chat_template": "x" * (CHAT_TEMPLATE_CHARS_MAX + 1)}),
            "chat_template.json",
        ),
    ],
)
def test_what_is_wrong_names_its_file(tmp_path: Path, name: str, text: str, file: str) -> None:
    """No template, no text, or too much of it."""
    with pytest.raises(InvalidModel) as caught:
        find_template(tmp_path, **{name: text})
    assert caught.value.file == file


def test_a_further_template_lies_in_the_model(tmp_path: Path) -> None:
    """A link in the folder of further ones that leads out of the model is refused by name."""
    place = tmp_path / "m"
    place.mkdir()
    folder_of(place, chat_template__jinja="a")
    (tmp_path / "outside.jinja").write_text("o")
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "outside.jinja")
    with pytest.raises(InvalidModel, match="leads out"):
        read_template(place)
