r"""Images of a chat: files that are named by an option, or by a path in what is typed.

A terminal types the path of a file that is dropped on it, each in its own way:

    /pictures/cat.png   '/pictures/my cat.png'   /pictures/my\ cat.png   file:///my%20cat.png

Invariants:
- What is taken for an image is a whole word or a quoted text, absolute (or below `~/`), with the
  name of an image, and a file that is there. All else stays text.
- A message is taken as a whole or not at all: a file that cannot be read sends nothing.
- To a model that does not see, paths are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from mlxd_controller.cli.chat.talk import Talk
from mlxd_shared.config import IMAGE_BYTES_MAX, IMAGES_MAX
from mlxd_shared.domain.chats import ContentPart

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif")
_WORD = re.compile(
    r"(?<!\S)(?:'(?P<single>[^'\n]+)'|\"(?P<double>[^\"\n]+)\"|(?P<bare>(?:\\.|[^\s\\'\"])+))"
    r"(?:[ \t]|(?!\S))"
)
_ESCAPED = re.compile(r"\\(.)")


class ImageNotUsable(Exception):
    """Why an image is not shown, for its user."""


@dataclass(frozen=True, slots=True)
class Found:
    """A message, and the images whose paths are in it."""

    text: str
    """The rest of it."""
    paths: tuple[Path, ...]


def find_images(text: str) -> Found:
    """Return the images whose paths are in a message. Looks at the disk."""
    paths: list[Path] = []

    def take(match: re.Match[str]) -> str:
        path = _image_at(match)
        if path is None:
            return match[0]
        paths.append(path)
        return ""

    rest = _WORD.sub(take, text)
    return Found(rest.strip() if paths else text, tuple(paths))


def _image_at(match: re.Match[str]) -> Path | None:
    """Return the image that a word names."""
    word = match["single"] or match["double"] or _ESCAPED.sub(r"\1", match["bare"] or "")
    if word.startswith("file://"):
        try:
            split = urlsplit(word)
        except ValueError:
            return None
        word = unquote(split.path) if split.netloc in ("", "localhost") else ""
    if not word.startswith(("/", "~/")) or not word.lower().endswith(SUFFIXES):
        return None
    try:
        path = Path(word).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # too long, no home, a null byte
        return None


def read_image(path: Path) -> ContentPart:
    """Return a file as an image of a message; what it holds is not looked into.

    Raises:
        ImageNotUsable: it cannot be read, is empty or too large.
    """
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(IMAGE_BYTES_MAX + 1)
    except OSError as error:
        raise ImageNotUsable(f"{path}: {error.strerror}") from error
    if not 0 < len(content) <= IMAGE_BYTES_MAX:
        raise ImageNotUsable(f"{path}: 1 to {IMAGE_BYTES_MAX} bytes")
    return ContentPart(image=content)


def take_images(talk: Talk, paths: Sequence[Path]) -> None:
    """Have images wait for the next message that is said.

    Raises:
        ImageNotUsable: one cannot be read, or there are too many; then none waits.
    """
    if len(talk.images) + len(paths) > IMAGES_MAX:
        raise ImageNotUsable(f"at most {IMAGES_MAX} images in a message")
    talk.images += tuple(map(read_image, paths))
