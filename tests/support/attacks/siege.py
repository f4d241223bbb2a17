"""Attacks on one server, what others get beside them, and what is left of them.

Invariants:
- The server, every attacker, the prober and the good client are processes of their own. Attackers
  are niced, and pause between volleys: what is measured is the server, not who gets a processor.
- In rounds, one kind of attack after another is made beside the fuzzer, as each was made when it
  found something; without, all at once.
- The good client is alone before and after, and what the server holds is looked at when it rests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mlxd import Client, LoadSpec
from tests.support.attacks.hostile import MODEL
from tests.support.attacks.tally import Tally, together
from tests.support.attacks.watcher import Probed, Streamed
from tests.support.overload import wait
from tests.support.served import Served, serve
from tests.support.storms import Held, Site
from tests.support.worker_process import ROOT

ATTACKER = "tests.support.attacks.attacker"
WATCHER = "tests.support.attacks.watcher"
BARE = "tests.support.bare_server"
GOOD_TOKENS = 100
END_S_MAX = 240.0
"""What attackers may take to end once their time is over: their last calls' deadlines, and more."""
QUIET_S_MAX = 120.0
BURST = "burst"


@dataclass(frozen=True, slots=True)
class Setting:
    """How an attack is made: volleys of so many calls, a pause between them, messages so large."""

    at_once: int
    pause_s: float
    scale: float = 1.0


FULL: Mapping[str, Setting] = {
    "fuzz": Setting(at_once=8, pause_s=0.1),
    "tiny_parts": Setting(at_once=1, pause_s=2.0),
    "constraints": Setting(at_once=4, pause_s=0.5),
    BURST: Setting(at_once=6000, pause_s=20.0),
    "rapid_reset": Setting(at_once=4, pause_s=0.25),
    "tokenize": Setting(at_once=24, pause_s=5.0),
}
"""For rounds on two cores: each attack keeps the server busy, and leaves it time for others."""
ALWAYS = "fuzz"
"""The attack that goes on in every round."""
MINIATURE: Mapping[str, Setting] = {
    "fuzz": Setting(at_once=4, pause_s=0.2),
    "tiny_parts": Setting(at_once=1, pause_s=1.0, scale=0.02),
    "constraints": Setting(at_once=2, pause_s=0.5, scale=0.02),
    BURST: Setting(at_once=200, pause_s=5.0),
    "rapid_reset": Setting(at_once=1, pause_s=0.25),
    "tokenize": Setting(at_once=4, pause_s=1.0, scale=0.02),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, and what with.

    warm_s: for how long it is attacked before anything is counted.
    round_s: how long a round takes; None: all attacks at once, and no rounds.
    rows_max: how many streams decode at once.
    waiting_max: how many streams may wait for a row; None: as many as a server lets by itself.
    settle_s: for how long nothing is under way before what the server holds is looked at.
    """

    seconds: float
    settings: Mapping[str, Setting]
    alone_s: float
    warm_s: float = 0.0
    round_s: float | None = None
    rows_max: int = 32
    waiting_max: int | None = None
    settle_s: float = 0.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """What the server holds at rest."""

    controller: Held
    worker_rss_nbytes: int
    accounts: Mapping[str, int]
    """Bytes that the worker accounts for, by account."""


@dataclass(slots=True)
class Outcome:
    """What became of a siege."""

    before: Holding
    after: Holding
    probed: Probed
    alone: list[Streamed]
    beside: Streamed
    tallies: dict[str, Tally] = field(default_factory=dict)
    worker_pids: set[int] = field(default_factory=set)
    """All that lived at one rest or the other."""
    deaths: int = 0
    errors: list[str] = field(default_factory=list)
    """What the log calls errors."""


async def besiege(plan: Plan, folder: Path) -> Outcome:
    """Serve the demo model and attack it as planned; return what became of it."""
    run_dir = folder / "run"
    waiting = () if plan.waiting_max is None else ("--waiting-max", str(plan.waiting_max))
    async with (
        serve("--run-dir", str(run_dir), "--reserve", "1%", *waiting) as server,
        Client(server.address) as client,
        client.load(MODEL, options=LoadSpec(rows_max=plan.rows_max)) as updates,
    ):
        async for _ in updates:
            pass
        site = Site(server, client, run_dir)
        if plan.warm_s:
            await _attack_in_rounds(server, plan, plan.warm_s)
        alone = [await _alone(server, plan.alone_s)]
        before, pids_before = await _resting(site, plan.settle_s)
        async with (
            _watch("health", server.address, bare=True) as probing,
            _watch("stream", server.address, str(GOOD_TOKENS)) as streaming,
        ):
            tallies = await _attack_in_rounds(server, plan, plan.seconds)
        await site.back_at(before.controller)  # connections end a moment after their peers
        after, pids_after = await _resting(site, plan.settle_s)
        alone.append(await _alone(server, plan.alone_s))
        lines = server.log_path.read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return Outcome(
        before,
        after,
        Probed(**probing.seen),
        alone,
        Streamed(**streaming.seen),
        tallies,
        pids_before | pids_after,
        sum(line["event"] == "worker died" for line in logged),
        [line["event"] for line in logged if line["level"] == "error"]
        + [line for line in lines if line.startswith("Traceback")],
    )


async def _attack_in_rounds(server: Served, plan: Plan, seconds: float) -> dict[str, Tally]:
    """Make all attacks of a plan for so long in all; return their tallies."""
    if plan.round_s is None:
        return await _attack(server, plan.settings, seconds, seed=plan.seed)
    kinds = [kind for kind in plan.settings if kind != ALWAYS]
    tallies: dict[str, Tally] = {}
    for number in range(max(round(seconds / plan.round_s), len(kinds))):
        wanted = {ALWAYS, kinds[number % len(kinds)]}
        settings = {kind: plan.settings[kind] for kind in plan.settings if kind in wanted}
        round_tallies = await _attack(server, settings, plan.round_s, seed=plan.seed + number)
        for kind, tally in round_tallies.items():
            tallies[kind] = together([tallies.get(kind, Tally()), tally])
    return tallies


async def _attack(
    server: Served, settings: Mapping[str, Setting], seconds: float, *, seed: int
) -> dict[str, Tally]:
    """Run attackers side by side for so long; return their tallies."""
    running = {
        kind: await _start(
            ATTACKER,
            *(server.address, kind, str(seconds), str(setting.at_once)),
            *(str(setting.pause_s), str(setting.scale), str(seed)),
        )
        for kind, setting in settings.items()
    }
    tallies = {}
    try:
        async with asyncio.timeout(seconds + END_S_MAX):
            for kind, process in running.items():
                output, _ = await process.communicate()
                assert process.returncode == 0, kind
                tallies[kind] = Tally(**json.loads(output))
    finally:
        for process in running.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
    return tallies


async def _alone(server: Served, seconds: float) -> Streamed:
    async with _watch("stream", server.address, str(GOOD_TOKENS)) as watch:
        await wait(seconds)
    return Streamed(**watch.seen)


async def _resting(site: Site, settle_s: float) -> tuple[Holding, set[int]]:
    """Return what the server holds once nothing has been under way for so long, and its workers."""
    async with asyncio.timeout(QUIET_S_MAX):
        async with site.client.watch_status(interval_s=0.2) as statuses:
            async for status in statuses:
                if not any(w.streams_running or w.streams_waiting for w in status.workers):
                    break
    await wait(settle_s)
    held = await site.at_rest()
    pids = {worker.pid for worker in status.workers if worker.exit_code is None}
    rss = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    accounts = {
        account.name: account.nbytes
        for worker in (await site.client.status()).workers
        if worker.pid in pids and worker.memory is not None
        for account in worker.memory.accounts
    }
    return Holding(held, rss, accounts), pids


@dataclass(slots=True)
class _Watch:
    """What a watcher printed, once it is over."""

    seen: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def _watch(
    verb: str, address: str, rest: str = "", *, bare: bool = False
) -> AsyncIterator[_Watch]:
    """Have a watcher watch during the body; `bare`: beside a bare server."""
    watch = _Watch()
    control = None
    if bare:
        control = await _start(BARE)
        assert control.stdout is not None
        rest = (await control.stdout.readline()).decode().strip()
    process = await _start(WATCHER, verb, address, rest)
    try:
        yield watch
    finally:
        watch.seen = json.loads(await _end(process))
        if control is not None:
            await _end(control)


async def _start(module: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )


async def _end(process: asyncio.subprocess.Process) -> bytes:
    """End a process by the end of its input; return what it printed."""
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(END_S_MAX):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output
