"""Paths of images in what is typed: each way in which terminals write a file that is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from mlxd_controller.cli.chat.pictures import (
    ImageNotUsable,
    find_images,
    read_image,
    take_images,
)
from mlxd_controller.cli.chat.slash import is_known
from mlxd_controller.cli.chat.talk import Talk
from mlxd_controller.cli.commands.prompts.run import _look
from mlxd_shared.config import IMAGE_BYTES_MAX, IMAGES_MAX
from mlxd_shared.domain.chats import ChatMessage, ContentPart
from mlxd_shared.domain.requests import SamplingOptions

Write = Callable[[Path], str]
WAYS: dict[str, Write] = {
    "single quotes": lambda path: f"'{path}'",
    "double quotes": lambda path: f'"{path}"',
    "backslashes": lambda path: str(path).replace(" ", r"\ "),
    "a URL": lambda path: f"file://{quote(str(path))}",
    "a URL of this machine": lambda path: f"file://localhost{quote(str(path))}",
}


@pytest.fixture(name="image")
def write_image(tmp_path: Path) -> Path:
    """A file with a blank in its path, and the name of an image."""
    path = tmp_path / "my cat.PNG"
    path.write_bytes(b"x")
    return path


def talk_of(*, sees: bool = True) -> Talk:
    """Return a conversation with a model that is loaded."""
    return Talk("demo", SamplingOptions(), None, None, False, sees=sees)


@pytest.mark.parametrize("way", WAYS)
def test_a_path_is_an_image_in_each_way(way: str, image: Path) -> None:
    """Alone, before, behind and within a text, which is what is left."""
    word = WAYS[way](image)
    for text, rest in (
        (word, ""), (f"{word} ", ""), (f"{word} what is it?", "what is it?"),
        (f"what is {word}", "what is"), (f"what is {word} like?\nsay", "what is like?\nsay"),
    ):  # fmt: skip
        message = find_images(text)
        assert (message.text, message.paths) == (rest, (image,)), text
    both = find_images(f"{word} {word}")
    assert (both.text, both.paths) == ("", (image, image))


def test_a_home_is_known(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below ~ as anywhere."""
    monkeypatch.setenv("HOME", str(image.parent))
    assert find_images(r"~/my\ cat.PNG").paths == (image,)


def test_all_else_stays_text(tmp_path: Path, image: Path) -> None:
    """To the blank: what is not there, no image by its name, relative, or part of a word."""
    other = tmp_path / "a.txt"
    other.write_text("x")
    folder = tmp_path / "b.png"
    folder.mkdir()
    bare = tmp_path / "c.png"
    bare.write_bytes(b"x")
    for text in (
        "", "hi  there ", "it's 'c.png'", "c.png", f"{tmp_path}/none.png", str(other), str(folder),
        f"see:{bare}", f"{bare},", f"({bare})", f"file://elsewhere{bare}", "file://[/c.png",
        f"'{bare}", "~nobody/c.png", f"/{'x' * 5000}.png", "/a\0.png", str(image),
    ):  # fmt: skip
        message = find_images(text)
        assert (message.text, message.paths) == (text, ()), text


def test_what_waits_is_bounded_and_whole(tmp_path: Path, image: Path) -> None:
    """Too many, too large, empty or gone: none of a message's images waits then."""
    talk = talk_of()
    take_images(talk, [image])
    assert talk.images == (ContentPart(image=b"x"),)
    large, empty = tmp_path / "large.png", tmp_path / "empty.png"
    with large.open("wb") as file:
        file.truncate(IMAGE_BYTES_MAX + 1)
    empty.touch()
    for bad, words in (
        ([image, large], f"1 to {IMAGE_BYTES_MAX} bytes"), ([image, empty], "1 to"),
        ([image, tmp_path / "gone.png"], "No such file"), ([image] * IMAGES_MAX, "at most"),
    ):  # fmt: skip
        with pytest.raises(ImageNotUsable, match=words):
            take_images(talk, bad)
        assert len(talk.images) == 1
    with large.open("wb") as file:
        file.truncate(IMAGE_BYTES_MAX)
    assert len(read_image(large).image or b"") == IMAGE_BYTES_MAX


def test_a_message_shows_what_was_dropped(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its images go with its rest, or wait for the next one; a command's argument is none."""
    talk = talk_of()
    assert _look(f"'{image}' what?", talk) == "what?"
    assert "my cat.PNG goes with this message" in capsys.readouterr().err
    shown = ContentPart(image=b"x")
    assert talk.say("what?") == ChatMessage("user", parts=(shown, ContentPart("what?")))
    assert _look(f"'{image}'", talk) == ""
    assert "goes with your next message" in capsys.readouterr().err
    assert talk.images == (shown,)
    command = f"/system Look at '{image}'"
    assert is_known(command)
    assert not is_known(str(image))
    assert _look(command, talk) == command
    assert talk.images == (shown,)


def test_a_model_that_does_not_see_is_told_a_path(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was typed, and whoever typed it is told; a file that cannot be read sends nothing."""
    blind = talk_of(sees=False)
    assert _look(f"'{image}' what?", blind) == f"'{image}' what?"
    assert "demo does not see images" in capsys.readouterr().err
    assert blind.images == ()
    image.write_bytes(b"")
    assert _look(f"'{image}' what?", talk_of()) == ""
    assert "1 to" in capsys.readouterr().err
