"""What was typed outlives the chat, whoever dies meanwhile, within its bounds."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

from mlxd_controller.cli.chat.history import HistoryFile, read_entries
from mlxd_shared.config import (
    HISTORY_BYTES_MAX,
    HISTORY_ENTRIES_MAX,
    HISTORY_ENTRY_CHARS_MAX,
)

WRITER = """
import itertools, sys
from pathlib import Path
from mlxd_controller.cli.chat.history import HistoryFile

history = HistoryFile(Path(sys.argv[1]), on_problem=print)
for number in itertools.count():
    history.store_string(f"{number} " + "x" * 9000)
    print(number, flush=True)
"""


def history(path: Path, problems: list[str] | None = None) -> HistoryFile:
    """A history as a chat opens it."""
    return HistoryFile(path, on_problem=([] if problems is None else problems).append)


def test_what_was_typed_is_there_in_the_next_chat(tmp_path: Path) -> None:
    """The latest first, several lines as one entry; nobody else may read the file."""
    path = tmp_path / "state" / "history"
    for text in ("one", "two\nlines", "drei \u00e4"):
        history(path).store_string(text)
    assert history(path).load_history_strings() == ["drei \u00e4", "two\nlines", "one"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    """Wherever the process died that wrote it."""
    path = tmp_path / "history"
    line = json.dumps("torn apart")
    for cut in range(len(line)):
        path.write_text(json.dumps("before") + "\n" + line[:cut])
        history(path).store_string("after")
        assert history(path).load_history_strings() == ["after", "before"], cut


def test_a_writer_that_is_killed_loses_no_entry_that_it_had_kept(tmp_path: Path) -> None:
    """Each that was said to be kept is there, whole."""
    path = tmp_path / "history"
    for kept in (3, 20, 60):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(kept)]
        writer.kill()
        writer.wait()
        writer.stdout.close()
        entries, _ = read_entries(path)
        numbers = [int(entry.split()[0]) for entry in entries]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[-1] >= said[-1]
        assert all(len(entry.split()[1]) == 9000 for entry in entries)


def test_a_file_that_is_too_large_is_cut_when_a_chat_begins(tmp_path: Path) -> None:
    """By entries and by bytes; the latest stay. An entry that is too long is not kept."""
    path = tmp_path / "history"
    path.write_text("".join(f'"{n}"\n' for n in range(HISTORY_ENTRIES_MAX + 9)))
    assert len(list(history(path).load_history_strings())) == HISTORY_ENTRIES_MAX
    assert len(path.read_text().splitlines()) == HISTORY_ENTRIES_MAX
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entry = json.dumps("x" * (HISTORY_ENTRY_CHARS_MAX // 2)) + "\n"
    path.write_text(entry * (2 * HISTORY_BYTES_MAX // len(entry)))
    history(path).load_history_strings()
    assert path.stat().st_size <= HISTORY_BYTES_MAX
    history(path).store_string("y" * (HISTORY_ENTRY_CHARS_MAX + 1))
    assert "y" not in path.read_text()


def test_a_file_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    """And the chat goes on without."""
    problems: list[str] = []
    (tmp_path / "file").write_text("")
    broken = history(tmp_path / "file" / "history", problems)
    assert list(broken.load_history_strings()) == []
    broken.store_string("x")
    broken.store_string("y")
    assert len(problems) == 1
    assert "no history is kept" in problems[0]
