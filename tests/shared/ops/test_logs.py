"""What a log line shows of a fault, and what it must not."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mlxd_shared.ops import logs
from tests.plugins.logs import set_default_logs

PROMPT = "zebra"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """Leave the logging of the other tests as it was."""
    yield
    set_default_logs()


def fail(prompt: str) -> None:
    """Fail with a prompt at hand."""
    assert prompt
    raise ValueError("broken")


def log_fault(fmt: logs.LogFormat) -> str:
    """Return what the log shows of a fault."""
    stream = io.StringIO()
    logs.configure(fmt=fmt, stream=stream)
    try:
        fail(PROMPT)
    except ValueError as error:
        logs.get_logger("test").error("it failed", exc_info=error)
    return stream.getvalue()


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_traceback_without_its_variables(fmt: logs.LogFormat) -> None:
    """The log says where a fault happened, but no value of a local variable, such as a prompt."""
    text = log_fault(fmt)

    assert "ValueError" in text
    assert "in fail" in text
    assert PROMPT not in text


def test_json_is_one_object_a_line() -> None:
    """However long the traceback, the line is one, and names component and level."""
    (line,) = log_fault("json").splitlines()
    value = json.loads(line)
    assert (value["component"], value["level"], value["event"]) == ("test", "error", "it failed")


def test_an_unknown_level_is_refused() -> None:
    """The error lists the levels."""
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        logs.configure(level="loud")


def test_a_log_that_nobody_reads_never_stops_its_writer() -> None:
    """The reader of the pipe goes away: lines are dropped, nothing is raised, then or later."""
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w", encoding="utf-8") as stream:
        logs.configure(fmt="json", stream=stream)
        log = logs.get_logger("test")
        log.info("read")
        assert b"read" in os.read(read_fd, 1000)
        os.close(read_fd)
        for _ in range(3):
            log.info("unread")


def test_nothing_steers_the_terminal_of_a_log() -> None:
    """Texts of others, such as names in a model's files, come as one harmless line."""
    stream = io.StringIO()
    logs.configure(fmt="console", stream=stream)
    logs.get_logger("test").info("refused \x1b[2J", reason="a\x9b2J\nb")
    (line,) = stream.getvalue().splitlines()
    assert "refused \\x1b[2J" in line
    assert "a\\x9b2J\\x0ab" in line


@pytest.mark.parametrize("before", ["", "import rich.cells\n"])
def test_a_log_imports_no_rich_and_leaves_others_theirs(before: str) -> None:
    """It would show nothing with rich, whose import takes a fifth of a worker's start."""
    program = (
        f"{before}import sys; from mlxd_shared.ops.logs import configure, get_logger\n"
        "configure(fmt='console')\n"
        "get_logger('test').error('failed', exc_info=ValueError('broken'))\n"
        "assert 'rich.traceback' not in sys.modules\n"
        "import rich.console\n"
        "configure(fmt='json')\n"
        "assert sys.modules['rich'] is rich\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "ValueError: broken" in done.stderr


def test_no_process_of_ours_imports_structlog_before_its_log_is_set_up() -> None:
    """It would bring rich along."""
    program = (
        "import sys; import mlxd_worker.__main__, mlxd_controller.cli.commands.serving.serve\n"
        "assert 'structlog' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
