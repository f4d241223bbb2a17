"""A Ray cluster for a test, in a process of its own: this one never imports Ray.

However a test ends, nothing of its cluster is left: all its processes have a mark in their
environment, and whoever still has that at the end is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.support.certificates import Authority, token_file

SCRIPT = Path(__file__).with_name("raylets.py")
START_S_MAX = 120.0
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}
MARK = "CLUSTER_OF_TESTS"


@dataclass(slots=True)
class RayCluster:
    """A running cluster: a head and named nodes."""

    address: str
    process: asyncio.subprocess.Process
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def order(self, what: str, name: str) -> None:
        """Have something happen to a node: kill, stop, continue or join."""
        assert await self._ask(what, name) == what

    async def memory(self, name: str) -> dict[str, float]:
        """Return the megabytes that a node's processes hold: `workers`, and `others`."""
        held = await self._ask("memory", name)
        assert isinstance(held, dict)
        return held

    async def read(self) -> object:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_S_MAX)
        return json.loads(line)

    async def _ask(self, what: str, name: str) -> object:
        assert self.process.stdin is not None
        async with self._turn:
            self.process.stdin.write(f"{what} {name}\n".encode())
            return await self.read()


@asynccontextmanager
async def ray_cluster(
    *names: str, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[RayCluster]:
    """Run a cluster with these nodes around the body."""
    mark = uuid.uuid4().hex
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), *names),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **QUIET, **environment, MARK: mark},
    )
    cluster = RayCluster("", process)
    try:
        cluster.address = str(await cluster.read())
        yield cluster
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), START_S_MAX)
        finally:
            await asyncio.to_thread(_reap, mark)


def _reap(mark: str) -> None:
    """Kill whatever has the mark, until nothing has."""
    while left := [each for each in psutil.process_iter() if _has_mark(each, mark)]:
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=START_S_MAX)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def own_address() -> str:
    """Return the address by which Ray knows this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 53))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def tls_folder(folder: Path) -> Path:
    """Return a folder with what nodes and controllers need."""
    folder.mkdir()
    authority = Authority(folder)
    pair = authority.issue("node", host=own_address())
    assert (pair.cert.name, pair.key.name) == ("node.pem", "node.key")
    token_file(folder)
    return folder
