"""A Ray cluster for a test, in a process of its own: this one never imports Ray."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SCRIPT = Path(__file__).with_name("raylets.py")
START_S_MAX = 120.0
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(slots=True)
class RayCluster:
    """A running cluster: a head and named nodes."""

    address: str
    process: asyncio.subprocess.Process

    async def order(self, what: str, name: str) -> None:
        """Have something happen to a node: kill, stop, continue or join."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {name}\n".encode())
        assert await self._read() == what

    async def _read(self) -> object:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_S_MAX)
        return json.loads(line)


@asynccontextmanager
async def ray_cluster(
    *names: str, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[RayCluster]:
    """Run a cluster with these nodes around the body."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), *names),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **QUIET, **environment},
    )
    cluster = RayCluster("", process)
    try:
        cluster.address = str(await cluster._read())
        yield cluster
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), START_S_MAX)
