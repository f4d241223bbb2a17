"""Saved chats: whole or as they were before, and checked before anything of them is taken."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.cli.chat.saved import ChatNotUsable, SavedChat, list_names, load, save
from mlxd_shared.config import SAVED_CHAT_BYTES_MAX
from mlxd_shared.domain.chats import ChatMessage, ContentPart, ToolCall

CALL = ToolCall("weather", '{"city": "Rome"}', "c1")
CHAT = SavedChat(
    "demo", "Be kind.", {"enable_thinking": False},
    (
        ChatMessage("user", "Rain?"), ChatMessage("assistant", tool_calls=(CALL,)),
        ChatMessage("tool", "no", tool_call_id="c1", name="weather"),
        ChatMessage("assistant", "No.", reasoning="It said no."),
    ),
)  # fmt: skip
WRITER = """
import itertools, sys
from pathlib import Path
from mlxd_controller.cli.chat.saved import SavedChat, save
from mlxd_shared.domain.chats import ChatMessage

for number in itertools.count():
    message = ChatMessage("user", f"{number} " + "x" * 300_000)
    save(Path(sys.argv[1]), "chat", SavedChat("m", "", {}, (message,) * 3))
    print(number, flush=True)
"""
GOOD: dict[str, Any] = {
    "version": 1, "model": "m", "system": "", "variables": {},
    "messages": [{"role": "user", "content": "x"}],
}  # fmt: skip


def test_a_chat_comes_back_as_it_was(tmp_path: Path) -> None:
    """Calls, results and reasoning too; nobody else may read it."""
    path = save(tmp_path / "chats", "a-1", CHAT)
    assert load(tmp_path / "chats", "a-1") == CHAT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list_names(tmp_path / "chats") == ["a-1"]
    with pytest.raises(ChatNotUsable, match="saved: a-1"):
        load(tmp_path / "chats", "b")


def test_images_come_back_as_they_were(tmp_path: Path) -> None:
    """Every byte, between texts, with what the file is said to be, or nothing said of that."""
    parts = (
        ContentPart("a"), ContentPart(image=bytes(range(256)), media_type="image/png"),
        ContentPart(image=b"x"), ContentPart(""),
    )  # fmt: skip
    chat = SavedChat("sees", "", {}, (ChatMessage("user", parts=parts), ChatMessage("user", "b")))
    save(tmp_path, "x", chat)
    assert load(tmp_path, "x") == chat


def test_a_chat_is_whole_after_its_writer_was_killed(tmp_path: Path) -> None:
    """At whatever moment: it is the one that was there before, or the next."""
    for kept in (1, 4, 9):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(kept)][-1]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        first, second, third = load(tmp_path, "chat").messages
        assert first == second == third
        assert int(first.content.split()[0]) >= said


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"more": 1}, {"system": 5}, {"variables": []}, {"messages": {}},
        {"messages": None}, {"messages": [{"role": "user", "content": None}]}, {"messages": [None]},
        {"messages": ["x"]}, {"messages": [{"role": "nobody"}]},
        {"messages": [{"role": "user", "more": ""}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "x", "more": ""}]}]},
    ],
)  # fmt: skip
def test_what_is_no_saved_chat_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """By its file, with what is wrong; nothing of it is taken."""
    (tmp_path / "x.json").write_text(json.dumps(GOOD))
    assert load(tmp_path, "x").messages == (ChatMessage("user", "x"),)
    (tmp_path / "x.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(ChatNotUsable, match="is no saved chat"):
        load(tmp_path, "x")


def test_bounds_and_files_that_cannot_be_used(tmp_path: Path) -> None:
    """Each is said: too long, torn, no folder."""
    long = SavedChat("m", "x" * SAVED_CHAT_BYTES_MAX, {}, ())
    with pytest.raises(ChatNotUsable, match="at most"):
        save(tmp_path, "x", long)
    (tmp_path / "x.json").write_bytes(b" " * (SAVED_CHAT_BYTES_MAX + 1))
    with pytest.raises(ChatNotUsable, match="at most"):
        load(tmp_path, "x")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ChatNotUsable, match="is no saved chat"):
        load(tmp_path, "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatNotUsable, match="cannot be written"):
        save(tmp_path / "file", "x", CHAT)
