"""Runs `mlxd` as users do: a process of its own, with real streams and signals."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

LIMIT_S = 90.0
"""For what takes a second or few: so long may a machine with too much to do take."""
COMMAND = (sys.executable, "-m", "mlxd_controller.cli")


NOBODYS_OWN = {
    "MLXD_CONFIG": "none", "MLXD_MODELS_DIR": "none", "MLXD_HUB_CACHE": "none",
    "MLXD_OLLAMA_MODELS": "none", "MLXD_HISTORY": "none", "MLXD_START": "false",
}  # fmt: skip
"""So that nothing is configured, listed or kept of whoever runs the tests, and nothing started."""


def clean_environment() -> dict[str, str]:
    """The environment without what would change what `mlxd` does or how it prints."""
    return NOBODYS_OWN | {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLXD_", "OTEL_")) and name not in {"COLUMNS", "FORCE_COLOR"}
    }


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[Any]:
        """The JSON values on stdout, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def rows(self) -> list[list[str]]:
        """The cells of each line of a table on stdout, split at two blanks or more."""
        lines = (line.split("  ") for line in self.out.splitlines())
        return [[cell.strip() for cell in line if cell.strip()] for line in lines]


async def start(
    *arguments: str,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int = asyncio.subprocess.PIPE,
    stderr: int = asyncio.subprocess.PIPE,
    cwd: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> asyncio.subprocess.Process:
    """Start `mlxd` with `arguments`; nothing of this process's own settings reaches it.

    python: the interpreter, which decides whose `mlxd` it is.
    """
    return await asyncio.create_subprocess_exec(
        *(python, *COMMAND[1:]),
        *arguments,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env=clean_environment() | dict(environment),
    )


async def mlxd(
    *arguments: str, piped: str | bytes | None = None, cwd: Path | None = None, **environment: str
) -> Ran:
    """Run `mlxd` to its end and return how it ended."""
    stdin = asyncio.subprocess.DEVNULL if piped is None else asyncio.subprocess.PIPE
    process = await start(*arguments, stdin=stdin, cwd=cwd, environment=environment)
    sent = piped.encode() if isinstance(piped, str) else piped
    out, err = await asyncio.wait_for(process.communicate(sent), LIMIT_S)
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())
