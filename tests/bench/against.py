"""`python -m tests.bench.against TREE`: this checkout beside another one, on one machine, in turn.

Each tree serves the same models by its own controller and worker, with its own environment; the
load comes from this one's generator. Rounds run both trees, in an order of their own, with prompts
of their own: what the machine does meanwhile hits both alike, so a few hundredths show. Ratios are
of medians, this tree's to the other's; lower is better where a measure ends in `_s`. One JSON
object a line goes to --out or standard output.

TREE is a checkout of another commit after `make setup`, such as a worktree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import grpc

from mlxd.v1 import model_pb2, model_pb2_grpc, types_pb2
from mlxd_controller.bench.requests import GRPC, Request
from mlxd_controller.cli.commands.serving.serve import LISTENING
from mlxd_shared.ops.measuring import Measures, Outcome, measures
from tests.bench.cases import CASES, CLIENTS, CONTEXT, Case, make_closed
from tests.bench.prompts import Prompts
from tests.bench.report import json_line, machine
from tests.bench.server import DEMO, SEED, SETTLING, float32_llama
from tests.bench.sides import Side, put_load
from tests.support.cli import clean_environment

HERE: Final = Path(__file__).parents[2]
NEW, OLD = "this", "other"
MODEL: Final = "bench"
OPEN_RATE: Final = 1.5
"""Requests a second of cases whose requests arrive by themselves."""

JUDGED: Final = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p99_s")
"""What clients see; the median time between tokens is nothing where messages carry several."""

ALONE: Final = (
    Case("one", "one stream at a time, 128 in, 64 out", make_closed(8, 128, 64)),
    Case("long", "one stream at a time, 768 in, 8 out", make_closed(4, 768, 8)),
)
"""Put by one client, on both models."""

LOADS: Final = ("stored", "float32", "q4")

Rounds = dict[str, list[Measures]]


@asynccontextmanager
async def serve_tree(tree: Path, folder: Path, context: int) -> AsyncIterator[Side]:
    """Serve the model in `folder` by a tree's own controller and worker, in float32."""
    process = await asyncio.create_subprocess_exec(
        *(str(tree / ".venv/bin/python"), "-m", "mlxd_controller.cli", "serve"),
        *("--address", "127.0.0.1:0", "--model", f"{MODEL}={folder}"),
        cwd=tree,
        env=clean_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip().removeprefix(LISTENING)
        options = types_pb2.LoadOptions(
            weights=types_pb2.WEIGHTS_FORMAT_FLOAT32, rows_max=CLIENTS, context_length=context
        )
        request = model_pb2.LoadModelRequest(model=MODEL, options=options)
        async with grpc.aio.insecure_channel(address) as channel:
            async for _ in model_pb2_grpc.ModelServiceStub(channel).LoadModel(request):
                pass
        yield Side(GRPC, address, MODEL)
    finally:
        process.terminate()
        await process.wait()


class Pair:
    """Two servers of one model, on which the same loads are put."""

    def __init__(self, folder: Path, sides: Mapping[str, Side]) -> None:
        """Both are loaded."""
        self._prompts = Prompts(folder, seed=SEED)
        self._draws = random.Random(SEED)
        self._sides = sides

    async def compare(self, case: Case, *, rounds: int, clients: int) -> Rounds:
        """Return each side's runs; a first one of both is not counted."""
        measured: Rounds = {name: [] for name in self._sides}
        for number in range(rounds + 1):
            names = list(self._sides)
            self._draws.shuffle(names)
            for name in names:
                requests = case.make(self._prompts, self._draws)
                figures = measures(await self._put(name, _pace(requests), clients))
                if number:
                    measured[name].append(figures)
            sys.stderr.write(f"\r{case.key} {number}/{rounds} ")
        sys.stderr.write("\n")
        return measured

    async def _put(self, name: str, requests: Sequence[Request], clients: int) -> Sequence[Outcome]:
        settling = make_closed(SETTLING, 16, 8)(self._prompts, self._draws)
        return await put_load(self._sides[name], requests, settling=settling, clients=clients)


def _pace(requests: Sequence[Request]) -> list[Request]:
    return [r if r.at_s is None else replace(r, at_s=r.at_s / OPEN_RATE) for r in requests]


async def serving_lines(
    trees: Mapping[str, Path], folder: Path, name: str, *, cases: Sequence[Case], rounds: int
) -> list[str]:
    """Compare what both trees serve of the model in `folder`; return JSON lines."""
    context = 1024 if folder == DEMO else CONTEXT
    async with AsyncExitStack() as stack:
        sides = {
            key: await stack.enter_async_context(serve_tree(tree, folder, context))
            for key, tree in trees.items()
        }
        pair = Pair(folder, sides)
        lines: list[str] = []
        for case in (*ALONE, *cases):
            clients = 1 if case in ALONE else CLIENTS
            measured = await pair.compare(case, rounds=rounds, clients=clients)
            lines += _judge(f"{name}.{case.key}", measured, JUDGED)
        return lines


async def script_lines(trees: Mapping[str, Path], folder: Path, *, rounds: int) -> list[str]:
    """Compare how fast models load, and steps of mixed lengths, by each tree's own benches."""
    lines: list[str] = []
    for form in LOADS:
        took: Rounds = {key: [] for key in trees}
        for number in range(rounds):
            for key, tree in sorted(trees.items(), reverse=bool(number % 2)):
                arguments = ("tests.bench.loads", "--runs", "1", "--forms", form, "--folder")
                for line in (await _run(tree, *arguments, str(folder))).splitlines():
                    figure = json.loads(line)
                    if figure.get("key") == f"loads.{form}.cached.ours_s":
                        took[key].append({"took_s": figure["value"]})
        lines += _judge(f"loads.{form}", took, ("took_s",))
    return lines


async def _run(tree: Path, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(str(tree / ".venv/bin/python"), "-m", *arguments),
        cwd=tree,
        env=clean_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {process.returncode} in {tree}")
    return out.decode()


def _judge(key: str, measured: Rounds, names: Iterable[str]) -> list[str]:
    lines = []
    for name in names:
        values = {side: [run[name] for run in runs] for side, runs in measured.items()}
        middle = {side: statistics.median(numbers) for side, numbers in values.items()}
        ratio = middle[NEW] / middle[OLD]
        worse = ratio if name.endswith("_s") and "_per_" not in name else 1 / ratio
        sys.stderr.write(
            f"  {key + '.' + name:32s} {middle[OLD]:10.4f} -> {middle[NEW]:10.4f}  {ratio:5.3f}"
            f"{'  worse' if worse > 1.03 else ''}\n"
        )
        lines.append(
            json_line(
                "against", key=f"against.{key}.{name}", this=middle[NEW], other=middle[OLD],
                ratio=ratio, runs=len(values[NEW]),
            )
        )  # fmt: skip
    return lines


async def main() -> None:
    """Compare one stream, the cases of the server bench, and loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="another checkout, set up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list("abcdef"))
    parser.add_argument("--models", nargs="*", choices=("demo", "llama"), default=["demo", "llama"])
    parser.add_argument("--load-rounds", type=int, default=5, help="0: none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trees = {NEW: HERE, OLD: args.tree.resolve()}
    cases = [case for case in CASES if case.key in args.cases]
    lines = [json_line("machine", **machine())]
    with tempfile.TemporaryDirectory() as folder:
        if "demo" in args.models:
            lines += await serving_lines(trees, DEMO, "demo", cases=(), rounds=4 * args.rounds)
        if "llama" in args.models:
            model = await float32_llama(Path(folder) / "llama")
            lines += await serving_lines(trees, model, "llama", cases=cases, rounds=args.rounds)
        if args.load_rounds:
            lines += await script_lines(trees, Path(folder), rounds=args.load_rounds)
    text = "".join(f"{line}\n" for line in lines)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
