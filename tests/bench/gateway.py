"""`python -m tests.bench.gateway`: the same loads over gRPC and over HTTP, in turn.

One controller with one worker, and the gateway that it started, serve a random Llama to a load
generator of either kind, a process of its own. Each run of either way has prompts of its own: one
worker serves both, and keeps the prefix of whatever it has read. Ratios and differences are of
medians, HTTP to gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mlxd import Client, LoadSpec, Weights
from mlxd_controller.bench.requests import GRPC, Request
from mlxd_shared.ops.measuring import Measures, measures, medians
from tests.bench.cases import CLIENTS, CONTEXT, Make, make_closed
from tests.bench.load import HTTP
from tests.bench.prompts import Prompts
from tests.bench.report import json_line, machine
from tests.bench.server import SEED, SETTLING, float32_llama
from tests.bench.sides import Side, put_load
from tests.support.gateways import serve_web

LOADS = {1: make_closed(16, 128, 64), CLIENTS: make_closed(64, 128, 256)}
"""By how many clients there are; the last is case (a) of the server bench."""
MODEL = "bench"
_SHOWN = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")


@asynccontextmanager
async def both_ways(folder: Path) -> AsyncIterator[tuple[Side, Side]]:
    """Serve the model in `folder`, loaded; yield how it is reached over gRPC and over HTTP."""
    async with serve_web("--model", f"{MODEL}={folder}") as web:
        assert web.served is not None
        address = web.served.address
        options = LoadSpec(
            weights=Weights.FLOAT32, rows_max=CLIENTS, context_length=CONTEXT, pinned=True
        )
        async with Client(address) as client, client.load(MODEL, options=options) as updates:
            async for _ in updates:
                pass
        yield Side(GRPC, address, MODEL), Side(HTTP, web.url.removeprefix("http://"), MODEL)


async def gateway_lines(folder: Path, *, runs: int) -> list[str]:
    """Measure the model in `folder`; return JSON lines."""
    prompts, draws = Prompts(folder, seed=SEED), random.Random(SEED)
    lines: list[str] = []
    async with both_ways(folder) as ways:
        for clients, make in LOADS.items():
            measured: dict[str, list[Measures]] = {way.kind: [] for way in ways}
            for number in range(runs):
                order = ways if number % 2 else ways[::-1]
                for way, requests in draw_run(order, make, prompts, draws):
                    settling = make_closed(SETTLING, 16, 8)(prompts, draws)
                    outcomes = await put_load(way, requests, settling=settling, clients=clients)
                    measured[way.kind].append(measures(outcomes))
                sys.stderr.write(f"\rgateway, {clients} clients, {number + 1}/{runs} ")
            sys.stderr.write("\n")
            lines += _report(clients, {kind: medians(each) for kind, each in measured.items()})
    return lines


def draw_run(
    ways: Sequence[Side], make: Make, prompts: Prompts, draws: random.Random
) -> list[tuple[Side, list[Request]]]:
    """Return what each way is asked in one run: as much of the same sizes, in other words."""
    return [(way, make(prompts, draws)) for way in ways]


def _report(clients: int, measured: Mapping[str, Measures]) -> list[str]:
    """Write a table of one load; return its lines."""
    lines = []
    for name in _SHOWN:
        direct, through = measured[GRPC][name], measured[HTTP][name]
        values = {GRPC: direct, HTTP: through, "more": through - direct}
        if direct:  # tokens that come together have no time between them
            values["ratio"] = through / direct
        ratio = f"{values['ratio']:8.3f}" if direct else "-"
        sys.stderr.write(f"  {name:14s} {direct:10.4f} {through:10.4f} {ratio:>8s}\n")
        lines += [
            json_line("gateway", key=f"gateway.{clients}.{name}.{side}", value=value)
            for side, value in values.items()
        ]
    return lines


async def main() -> None:
    """Measure by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = await float32_llama(Path(folder) / "random-llama")
        lines = await gateway_lines(model, runs=args.runs)
    sys.stdout.writelines(f"{line}\n" for line in [json_line("machine", **machine()), *lines])


if __name__ == "__main__":
    asyncio.run(main())
