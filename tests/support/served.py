"""`mlxd serve` as a process for tests: where it listens, its log, its stop."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxd_controller.cli.commands.serving.serve import LISTENING
from tests.support.cli import LIMIT_S, start


@dataclass(frozen=True, slots=True)
class Served:
    """A server that takes requests."""

    address: str
    process: asyncio.subprocess.Process
    log_path: Path

    def find_logged(self, event: str) -> dict[str, Any]:
        """Return the first log line of this event."""
        return next(line for line in self._lines() if line["event"] == event)

    def list_logged(self, event: str) -> list[dict[str, Any]]:
        """Return all log lines of this event."""
        return [line for line in self._lines() if line["event"] == event]

    def count(self, event: str) -> int:
        """Return how many log lines of this event there are."""
        return len(self.list_logged(event))

    def _lines(self) -> Iterator[dict[str, Any]]:
        whole, _, _ = self.log_path.read_text(encoding="utf-8").rpartition("\n")
        return (json.loads(line) for line in whole.splitlines() if line.startswith("{"))


@asynccontextmanager
async def serve(
    *options: str,
    address: str = "127.0.0.1:0",
    environment: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> AsyncIterator[Served]:
    """Serve with `options` around the body, then stop gracefully; python: as of `start`."""
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = await start(
                *("serve", "--address", address, "--log-format", "json", *options),
                stderr=log.fileno(),
                environment=environment,
                python=python,
            )
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode().strip()
            assert line.startswith(LISTENING), log_path.read_text(encoding="utf-8")
            yield Served(line.removeprefix(LISTENING), process, log_path)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), LIMIT_S)
