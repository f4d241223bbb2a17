"""A server as a service of its user: what systemd and launchd are told, and by which commands.

Pure: what is made here is written and run by `command`.
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxd_shared import config

NAME = "mlxd.service"
LABEL = "dev.mlxd"
STOP_S = int(2 * (config.SHUTDOWN_GRACE_S + config.WORKER_INTERRUPT_GRACE_S))
"""Between SIGTERM and SIGKILL: streams end first, then the workers, and twice that time."""
RESTART_S = 2
_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the system's; one that `may_fail` says what was so already."""

    command: tuple[str, ...]
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """A file that describes a service, and the commands around it."""

    path: Path
    text: str
    start: tuple[Step, ...]
    """Once the file is there: also in place of one that runs with another file."""
    stop: tuple[Step, ...]
    """Before the file is removed."""
    forget: tuple[Step, ...]
    """After that."""
    state: tuple[str, ...]
    """Prints `is_up` among other words where the service runs."""
    is_up: str
    hint: str = ""


def systemd(
    command: Sequence[str], *, home: Path, environment: Mapping[str, str], kept: Mapping[str, str]
) -> Service:
    """Return the service as a unit of the user's systemd.

    kept: variables that the server is to have.

    Raises:
        ValueError: a word that no unit can hold.
    """
    base = environment.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if base.startswith("/") else home / ".config"
    variables = [f"Environment={_quote(f'{name}={value}')}" for name, value in kept.items()]
    lines = [
        "[Unit]",
        "Description=mlxd: MLX language models over gRPC and HTTP",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(map(_quote, command))}",
        *variables,
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        "# SIGTERM goes to the controller, which ends the streams and then its workers.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    control = ("systemctl", "--user")
    return Service(
        path=folder / "systemd" / "user" / NAME,
        text="\n".join(lines) + "\n",
        start=(
            Step((*control, "daemon-reload")),
            Step((*control, "enable", NAME)),
            Step((*control, "restart", NAME)),
        ),
        stop=(Step((*control, "disable", "--now", NAME)),),
        forget=(Step((*control, "daemon-reload")),),
        state=(*control, "is-active", NAME),
        is_up="active",
        hint="it runs while you are logged in; `loginctl enable-linger` keeps it running",
    )


def launchd(
    command: Sequence[str], *, home: Path, user_id: int, kept: Mapping[str, str]
) -> Service:
    """Return the service as an agent of launchd: Metal is there for a user who is logged in.

    kept: variables that the server is to have.

    Raises:
        ValueError: a word that no property list can hold.
    """
    log = str(home / "Library" / "Logs" / "mlxd.log")
    agent: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},  # after a crash, not after it was told to stop
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",  # people wait for it: not to be throttled
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    if kept:
        agent["EnvironmentVariables"] = dict(kept)
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    domain = f"gui/{user_id}"
    leave = Step(("launchctl", "bootout", f"{domain}/{LABEL}"), may_fail=True)
    return Service(
        path=path,
        text=plistlib.dumps(agent, sort_keys=False).decode(),
        start=(leave, Step(("launchctl", "bootstrap", domain, str(path)))),
        stop=(leave,),
        forget=(),
        state=("launchctl", "print", f"{domain}/{LABEL}"),
        is_up="running",
    )


def _quote(word: str) -> str:
    """Return a word as systemd reads it: no specifier, no variable, one word."""
    if not word.isprintable():
        raise ValueError(f"{word!r} holds what no unit can")
    plain = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
