"""SMG from its wheel in front of controllers: started, asked over HTTP, ended."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.support.cli import LIMIT_S, clean_environment
from tests.support.ports import own_port
from tests.support.served import Served, serve

LOOK_S = 0.1
"""Between two looks at what SMG knows."""
QUICK = (
    "--health-check-interval-secs", "1", "--health-check-timeout-secs", "1",
    "--health-failure-threshold", "2", "--load-monitor-interval", "1",
    "--worker-wedge-secs", "60", "--cb-timeout-duration-secs", "2",
)  # fmt: skip
"""As docs/deploy recommends, but quicker: SMG's own times are half a minute and more."""


@dataclass(frozen=True, slots=True)
class Routed:
    """SMG, which takes requests."""

    http: httpx2.AsyncClient
    log_path: Path
    ended: asyncio.Task[int]

    async def pause(self) -> None:
        """Wait a moment; fail if SMG has ended: it tells nobody what it comes to know."""
        await asyncio.wait({self.ended}, timeout=LOOK_S)
        assert not self.ended.done(), self.log_path.read_text(encoding="utf-8")

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Return the JSON of a good answer."""
        answer = await self.http.post(path, json=dict(body))
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    async def events(self, path: str, body: Mapping[str, object]) -> list[Any]:
        """Return the data of a whole stream's events, but for the mark of its end."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            return [
                json.loads(line.removeprefix("data: "))
                async for line in answer.aiter_lines()
                if line.startswith("data: {")
            ]

    async def until_known(self, count: int) -> None:
        """Wait until this many workers can be asked, and their tokenizers are there."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                answer = await self.http.get("/workers")
                workers = answer.json()["workers"] if answer.status_code == 200 else []
                if sum(bool(worker["is_healthy"]) for worker in workers) == count:
                    tokenizers = (await self.http.get("/v1/tokenizers")).json()["tokenizers"]
                    if {each["name"] for each in tokenizers} >= {w["model_id"] for w in workers}:
                        return
                await self.pause()


@asynccontextmanager
async def smg_over(
    manifest: Path, *options: str, workers: int, log_path: Path
) -> AsyncIterator[Routed]:
    """Run SMG over the workers of a manifest around the body, then end it."""
    async with AsyncExitStack() as stack:
        address = stack.enter_context(own_port())
        metrics = stack.enter_context(own_port())
        log = stack.enter_context(log_path.open("wb"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "smg", "launch", "--enable-igw"),
            *("--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", metrics.rpartition(":")[2]),
            *("--discovery-provider", "file", "--discovery-file", str(manifest)),
            *QUICK,
            *options,
            env=clean_environment(),
            stdout=log.fileno(),
            stderr=log.fileno(),
        )
        stack.push_async_callback(_end, process)
        http = httpx2.AsyncClient(base_url=f"http://{address}", timeout=LIMIT_S)
        await stack.enter_async_context(http)
        routed = Routed(http, log_path, asyncio.create_task(process.wait()))
        await _until_listening(routed)
        await routed.until_known(workers)
        yield routed


@asynccontextmanager
async def serve_door(manifest: Path, *options: str) -> AsyncIterator[Served]:
    """Serve models at a router's door around the body, at ports that the system chooses."""
    async with serve(
        *("--router", "127.0.0.1:0", "--router-manifest", str(manifest)), *options
    ) as served:
        yield served


def targets_of(manifest: Path) -> list[str]:
    """Return where the models of a manifest are."""
    workers = json.loads(manifest.read_text(encoding="utf-8"))["workers"]
    return [worker["url"].removeprefix("grpc://") for worker in workers]


def write_manifest(path: Path, targets: Sequence[str]) -> None:
    """Write one as an operator does who has several machines."""
    workers = [{"url": f"grpc://{target}"} for target in targets]
    path.write_text(json.dumps({"version": 1, "workers": workers}), encoding="utf-8")


async def _until_listening(routed: Routed) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await routed.http.get("/workers")
            except httpx2.TransportError:
                await routed.pause()
            else:
                return


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
    await process.wait()
