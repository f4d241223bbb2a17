"""`mlxd service`: what systemd and launchd are told, in text and by commands of the same names."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mlxd_controller.cli.background import command
from mlxd_controller.cli.background.units import launchd, systemd
from mlxd_shared.config import SHUTDOWN_GRACE_S, WORKER_INTERRUPT_GRACE_S
from tests.support.cli import mlxd
from tests.tooling.command_line import parse_command

TIMEOUT_S = 60
under_systemd = pytest.mark.skipif(sys.platform != "linux", reason="launchd is the manager here")
NEEDS_S = SHUTDOWN_GRACE_S + WORKER_INTERRUPT_GRACE_S
ODD = ["/a b/mlxd", "serve", "--model", '100%=/x/$HOME/"q"\\', "--log-level", "info"]
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$FAKE_LOG"
case " $FAKE_FAILS " in *" $1 "* | *" $2 "*) echo "no $1 here" >&2; exit 5;; esac
case "$*" in *is-active* | print*) echo "state = $FAKE_STATE"; echo "$FAKE_STATE";; esac
"""


@pytest.fixture(name="called")
def fake_managers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a systemctl and a launchctl first on PATH; return the file of how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemctl", "launchctl"):
        (folder / name).write_text(FAKE, encoding="utf-8")
        (folder / name).chmod(0o755)
    log = tmp_path / "called"
    log.touch()
    for name, value in (
        ("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}"), ("FAKE_LOG", str(log)),
        ("FAKE_STATE", "active"), ("FAKE_FAILS", ""), ("HOME", str(tmp_path)),
        ("XDG_CONFIG_HOME", ""),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    return log


def calls(log: Path) -> list[str]:
    """How the fakes were called."""
    return log.read_text(encoding="utf-8").splitlines()


def value_of(text: str, key: str) -> str:
    """The one value of a key in a unit."""
    (value,) = (line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}="))
    return value


def test_a_unit_starts_what_it_is_told() -> None:
    """Each word as one word, whatever it holds; variables and folders as they are."""
    unit = systemd(
        ODD, home=Path("/h"), environment={"XDG_CONFIG_HOME": "/c"}, kept={"MLXD_CONFIG": "/a b"}
    )
    assert unit.path == Path("/c/systemd/user/mlxd.service")
    line = value_of(unit.text, "ExecStart")
    assert shlex.split(line.replace("%%", "%").replace("$$", "$")) == ODD
    assert value_of(unit.text, "Environment") == '"MLXD_CONFIG=/a b"'
    assert float(value_of(unit.text, "TimeoutStopSec")) > NEEDS_S
    plain = systemd(["/m", "serve"], home=Path("/h"), environment={}, kept={})
    assert plain.path == Path("/h/.config/systemd/user/mlxd.service")
    assert value_of(plain.text, "ExecStart") == "/m serve"
    assert "Environment" not in plain.text
    with pytest.raises(ValueError, match="holds what no unit can"):
        systemd(["/m", "a\nb"], home=Path("/h"), environment={}, kept={})


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """It knows every setting and finds nothing to complain about."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    words = [sys.executable, "-m", "mlxd_controller.cli", "serve", "--model", "a b=/$x/%y"]
    unit = systemd(words, home=tmp_path, environment={}, kept={"MLXD_CONFIG": "/a b"})
    path = tmp_path / "mlxd.service"
    path.write_text(unit.text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_starts_what_it_is_told() -> None:
    """A property list of the same words; it waits for a graceful stop, and is not throttled."""
    agent = launchd(ODD, home=Path("/h"), user_id=501, kept={"MLXD_CONFIG": "/c"})
    assert agent.path == Path("/h/Library/LaunchAgents/dev.mlxd.plist")
    properties = plistlib.loads(agent.text.encode())
    assert properties["ProgramArguments"] == ODD
    assert properties["EnvironmentVariables"] == {"MLXD_CONFIG": "/c"}
    assert properties["ExitTimeOut"] > NEEDS_S
    assert properties["KeepAlive"] == {"SuccessfulExit": False}
    assert properties["StandardErrorPath"] == "/h/Library/Logs/mlxd.log"
    bare = plistlib.loads(launchd(["/m"], home=Path("/h"), user_id=1, kept={}).text.encode())
    assert "EnvironmentVariables" not in bare


@under_systemd
@pytest.mark.asyncio
async def test_a_service_is_installed_shown_and_removed(tmp_path: Path, called: Path) -> None:
    """By the commands of systemd, in their order; the file is what --print shows."""
    environment: dict[str, Any] = {
        name: os.environ[name] for name in ("PATH", "FAKE_LOG", "FAKE_STATE", "HOME")
    }
    path = tmp_path / ".config/systemd/user/mlxd.service"
    options = ("--", "--http", "--memory-limit", "12G")
    shown = await mlxd("service", "install", "--print", *options, **environment)
    assert (shown.code, calls(called), path.exists()) == (0, [], False)
    program, *words = shlex.split(value_of(shown.out, "ExecStart"))
    assert (program, words[:2]) == (sys.executable, ["-m", "mlxd_controller.cli"])
    assert parse_command(["mlxd", *words[2:]])["memory_limit"] == 12 << 30

    before = await mlxd("service", "status", **environment)
    assert (before.code, "not installed" in before.out) == (1, True)
    installed = await mlxd("service", "install", *options, **environment)
    assert (installed.code, installed.out) == (0, f"installed {path}\n")
    assert path.read_text(encoding="utf-8") == shown.out
    assert "enable-linger" in installed.err
    user = "systemctl --user"
    assert calls(called) == [
        f"{user} daemon-reload", f"{user} enable mlxd.service", f"{user} restart mlxd.service",
    ]  # fmt: skip
    running = await mlxd("service", "status", "--json", **environment)
    assert running.objects == [{"path": str(path), "installed": True, "running": True}]
    ended = await mlxd("service", "status", **environment | {"FAKE_STATE": "inactive"})
    assert (running.code, ended.code, "not running" in ended.out) == (0, 1, True)

    removed = await mlxd("service", "uninstall", **environment)
    assert (removed.code, removed.out, path.exists()) == (0, f"removed {path}\n", False)
    assert calls(called)[-2:] == [f"{user} disable --now mlxd.service", f"{user} daemon-reload"]
    again = await mlxd("service", "uninstall", **environment)
    assert (again.code, again.out) == (0, "no service is installed\n")


@under_systemd
@pytest.mark.asyncio
async def test_what_cannot_be_is_refused(tmp_path: Path, called: Path) -> None:
    """Options that the server would refuse, a second background, a manager that fails or is not."""
    environment: dict[str, Any] = {name: os.environ[name] for name in ("PATH", "FAKE_LOG", "HOME")}
    for options, problem in (
        (("--no-such",), "No such option"),
        (("--memory-limit", "much"), "'much' is not a size"),
        (("--detach",), "--detach: the system keeps a service in the background itself"),
    ):
        refused = await mlxd("service", "install", "--", *options, **environment)
        assert refused.code == 2
        assert problem in " ".join(refused.err.split())
    assert calls(called) == []
    failed = await mlxd("service", "install", **environment | {"FAKE_FAILS": "enable"})
    assert failed.code == 1
    assert failed.err == "mlxd: systemctl --user enable mlxd.service: no --user here\n"
    nobody = await mlxd("service", "install", **environment | {"PATH": str(tmp_path)})
    assert (nobody.code, "there is no systemctl here" in nobody.err) == (1, True)


@under_systemd
@pytest.mark.asyncio
async def test_the_configuration_file_that_was_named_is_the_service_s_too(called: Path) -> None:
    """By its absolute path: a service has no shell's variables."""
    environment: dict[str, Any] = {name: os.environ[name] for name in ("PATH", "FAKE_LOG", "HOME")}
    none = await mlxd("service", "install", "--print", **environment)
    assert value_of(none.out, "Environment") == "MLXD_CONFIG=none"
    assert calls(called) == []


def test_an_agent_is_put_in_place_and_taken_away(tmp_path: Path, called: Path) -> None:
    """By the commands of launchd; one that did not run before is no trouble."""
    agent = launchd(["/m"], home=tmp_path, user_id=501, kept={})
    os.environ["FAKE_FAILS"] = "bootout"
    assert not command.is_running(agent)
    command.put_in_place(agent)
    assert calls(called)[1:] == [
        "launchctl bootout gui/501/dev.mlxd", f"launchctl bootstrap gui/501 {agent.path}",
    ]  # fmt: skip
    assert agent.path.read_text(encoding="utf-8") == agent.text
    os.environ["FAKE_STATE"] = "running"
    assert command.is_running(agent)
    assert command.take_away(agent)
    assert not command.take_away(agent)
    os.environ["FAKE_FAILS"] = "bootstrap"
    with pytest.raises(typer.Exit):
        command.put_in_place(agent)
