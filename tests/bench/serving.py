"""`python -m tests.bench.serving --device cuda`: what clients get, beside the engine's own loop.

A random model of a well-known shape on disk; an engine alone, in a process of its own; then a
controller with one worker, under load from several generator processes, of whose processor time
the report has the most that one of them took. Prompts and shape are the same for both, greedy,
medians of runs. One JSON object a line on standard output, a table on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxd import Client, LoadSpec, Weights
from mlxd_controller.bench.cells import Cell, Plan
from mlxd_controller.bench.requests import GRPC, Request
from mlxd_controller.bench.ways import LinesWay, engine_alone
from mlxd_shared.ops.measuring import Measures, Outcome, measures, medians
from tests.bench.prompts import Prompts
from tests.bench.report import json_line, machine
from tests.bench.server import DEMO, SEED
from tests.bench.sides import Side, peer_side, put_load
from tests.support.served import serve

MODEL = "bench"
GENERATORS = 4
"""Processes that clients are spread over."""
SETTLING_TOKENS = 8
SHOWN = (
    "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "message_gap_p50_s",
    "message_gap_p99_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients in a closed loop, each with `turns` requests of one size."""

    key: str
    clients: int
    turns: int
    prompt: int
    new: int
    common: int = 0
    """Tokens that all prompts begin with, beside their own."""

    def requests(self, prompts: Prompts) -> list[Request]:
        """Return requests of their own prompts."""
        head = prompts.make(self.common) if self.common else ""
        # The token that begins a text begins the common part alone.
        own = self.prompt + (prompts.begun if self.common else 0)
        count = self.common + self.prompt
        return [
            Request(head + prompts.make(own), count, self.new)
            for _ in range(self.clients * self.turns)
        ]


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured of one model."""

    rows: int
    context: int
    loads: tuple[Load, ...]
    alone_new: int
    """Tokens of the streams that are compared with the same ones alone."""


def sizes(clients: Sequence[int], *, small: bool) -> Size:
    """Return the loads of these numbers of clients; small: such that a CPU soon has done them."""
    prompt, new, common = (16, 12, 40) if small else (128, 256, 2000)
    most = max(clients)
    loads = [
        Load(f"closed.{count}", count, 4 if count == 1 else 2, prompt, new) for count in clients
    ]
    loads.append(Load(f"burst.{min(most, 32)}", min(most, 32), 1, prompt, new // 4))
    loads.append(Load(f"common.{min(most, 32)}", min(most, 32), 2, prompt, new // 4, common))
    context = common + prompt + new
    return Size(most, context, tuple(loads), new // 4)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a load."""

    outcomes: tuple[Outcome, ...]
    generator_cores: float
    """What the generator processes took together, as a part of the time the load took."""


async def put_spread(side: Side, requests: Sequence[Request], *, clients: int) -> Ran:
    """Put a load on a server from `GENERATORS` processes, or one a client, all at once.

    None begins before each has settled: else the first ones' time would count for all.
    """
    parts = min(GENERATORS, clients)
    together = asyncio.Barrier(parts)
    settling = (Request(requests[0].text, requests[0].prompt_tokens, SETTLING_TOKENS),)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    loads = [
        put_load(
            side, requests[part::parts], settling=settling, together=together,
            clients=clients // parts + (part < clients % parts),
        )
        for part in range(parts)
    ]  # fmt: skip
    # Where one fails all of them end: none waits for it, or goes on beside the next load.
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(load) for load in loads]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    after, took_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began_s
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    outcomes: list[Outcome | None] = [None] * len(requests)
    for part, task in enumerate(tasks):
        outcomes[part::parts] = task.result()
    return Ran(tuple(each for each in outcomes if each is not None), spent_s / took_s / parts)


@asynccontextmanager
async def serve_loaded(
    folder: Path, size: Size, weights: Weights
) -> AsyncIterator[tuple[Side, float]]:
    """Serve the model; yield how it is reached, and the seconds from asking to its first token."""
    async with serve("--model", f"{MODEL}={folder}") as server, Client(server.address) as client:
        began_s = time.perf_counter()
        options = LoadSpec(
            weights=weights, rows_max=size.rows, context_length=size.context, pinned=True
        )
        async with client.load(MODEL, options=options) as updates:
            async for _ in updates:
                pass
        async with client.generate("Once", model=MODEL, max_tokens=1) as stream:
            async for _ in stream:
                pass
        yield Side(GRPC, server.address, MODEL), time.perf_counter() - began_s


async def loop_measures(
    loop: LinesWay, load: Load, prompts: Prompts, *, runs: int
) -> dict[str, float]:
    """Return what the engine alone does with as many streams, all at once."""
    measured: list[Measures] = []
    for _ in range(runs):
        ids = [prompts.ids(request.text) for request in load.requests(prompts)[: load.clients]]
        measured.append(measures((await loop.run(ids, load.new)).outcomes))
    return medians(measured)


async def same_as_alone(side: Side, size: Size, prompts: Prompts) -> tuple[int, int]:
    """Return how many streams say the same in company as alone, and of how many."""
    count = min(size.rows, 32)
    load = Load("alone", count, 1, size.loads[0].prompt, size.alone_new)
    requests = load.requests(prompts)
    alone = (await put_spread(side, requests, clients=1)).outcomes
    together = (await put_spread(side, requests, clients=count)).outcomes
    return sum(a.text == b.text for a, b in zip(alone, together, strict=True)), count


async def lines_of(folder: Path, name: str, args: argparse.Namespace) -> list[str]:
    """Measure one model; return JSON lines."""
    size = sizes(args.clients, small=args.small)
    weights = Weights.STORED if args.device == "cuda" else Weights.FLOAT32
    prompts, lines = Prompts(folder, seed=SEED), []
    alone: dict[str, dict[str, float]] = {}
    new = size.loads[0].new
    plan = Plan((Cell(size.context - new, size.rows),), new_tokens=new, runs=args.runs)
    async with engine_alone(folder, plan, weights) as loop:
        for load in size.loads:
            if load.key.startswith("closed"):
                alone[load.key] = await loop_measures(loop, load, prompts, runs=args.runs)
    for start in ("first", "second"):
        async with serve_loaded(folder, size, weights) as (side, ready_s):
            lines.append(line(f"{name}.ready.{start}_s", ready_s))
            if start == "second":
                lines += await served_lines(side, name, size, prompts, alone, runs=args.runs)
    if args.peer and importlib.util.find_spec("mlx_lm"):
        async with peer_side(folder, blas="shipped" if args.device == "cuda" else "ours") as side:
            lines += await served_lines(
                side, f"{name}.mlx-lm", size, prompts, {}, runs=args.runs, may_fail=True
            )
    return lines


async def served_lines(
    side: Side,
    name: str,
    size: Size,
    prompts: Prompts,
    alone: Mapping[str, Mapping[str, float]],
    *,
    runs: int,
    may_fail: bool = False,
) -> list[str]:
    """Measure a server that has the model loaded; alone: what the engine's loop did, by load.

    may_fail: a load that the server does not stand is said, and the next one is put.
    """
    lines: list[str] = []
    for load in size.loads:
        measured: list[Measures] = []
        cores = 0.0
        try:
            for _ in range(runs):
                ran = await put_spread(side, load.requests(prompts), clients=load.clients)
                measured.append(measures(ran.outcomes))
                cores = max(cores, ran.generator_cores)
        except RuntimeError as error:
            if not may_fail:
                raise
            sys.stderr.write(f"{name} {load.key}: {error}\n")
            continue
        figures = {**medians(measured), "generator_cores": cores}
        if load.key in alone:
            loop = alone[load.key]
            figures["loop_tokens_per_s"] = loop["tokens_per_s"]
            decoding = loop.get("decode_tokens_per_s", loop["tokens_per_s"])
            figures["loop_decode_tokens_per_s"] = decoding
            figures["of_loop"] = figures["tokens_per_s"] / decoding
        lines += [line(f"{name}.{load.key}.{what}", value) for what, value in figures.items()]
        show = "".join(f" {what} {figures[what]:.4f}" for what in SHOWN if what in figures)
        ratio = f" of the loop {figures['of_loop']:.3f}" if "of_loop" in figures else ""
        sys.stderr.write(f"{name} {load.key}:{show}{ratio} generators {cores:.2f}\n")
        sys.stderr.flush()
    same, count = await same_as_alone(side, size, prompts)
    sys.stderr.write(f"{name}: {same} of {count} as alone\n")
    return [*lines, line(f"{name}.as_alone", same / count)]


def line(key: str, value: float) -> str:
    """Return one figure's line."""
    return json_line("serving", key=f"serving.{key}", value=value)


async def write_model(folder: Path, shape: str, *, context: int, form: str) -> None:
    """Write the random model, in a process of its own: this one imports no MLX."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.models", str(folder), str(DEMO), str(SEED)),
        *(str(context), form, shape),
        stdout=asyncio.subprocess.DEVNULL,
    )
    if await process.wait():
        message = "the random model could not be written"
        raise RuntimeError(message)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--models", nargs="+", help="shapes; by default what the device can hold")
    parser.add_argument("--clients", nargs="+", type=int, help="by default 1, 32 and 128; 1, 8")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave mlx-lm out")
    parser.add_argument("--small", action="store_true", help="short prompts and answers")
    parser.add_argument("--folder", type=Path, help="where models are written and kept")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.models = args.models or (["tiny"] if on_cpu else ["0.6b"])
    args.clients = args.clients or ([1, 8] if on_cpu else [1, 32, 128])
    args.small = args.small or on_cpu
    return args


async def run(args: argparse.Namespace, folder: Path) -> list[str]:
    """Measure every model; return JSON lines."""
    lines = [json_line("machine", **machine())]
    form = "bfloat16" if args.device == "cuda" else "float32"
    context = 2 * sizes(args.clients, small=args.small).context
    for name in args.models:
        path = folder / name
        if not path.exists():
            await write_model(path, name, context=context, form=form)
        lines += await lines_of(path, name, args)
    return lines


def main() -> None:
    """Print the lines."""
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        lines = asyncio.run(run(args, args.folder or Path(temporary)))
    sys.stdout.write("".join(f"{each}\n" for each in lines))


if __name__ == "__main__":
    main()
