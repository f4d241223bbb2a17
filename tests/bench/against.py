"""`python -m tests.bench.against TREE`: this checkout beside another one, on one machine, in turn.

Each tree serves the same models by its own controller and worker, with its own environment; the
load comes from this one's generator. Rounds run both trees, in an order of their own, with prompts
of their own, so that what the machine does meanwhile hits both alike. Ratios are of medians, this
tree's to the other's. One JSON object a line goes to --out or standard output.

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
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from mlxd_controller.bench.requests import Request
from mlxd_shared.ops.measuring import Measures, Outcome, measures
from tests.bench.cases import CASES, CLIENTS, CONTEXT, Case, make_closed
from tests.bench.loads import FORMS
from tests.bench.prompts import Prompts
from tests.bench.report import json_line, machine, write_lines
from tests.bench.server import DEMO, SEED, SETTLING, float32_llama
from tests.bench.sides import Side, our_side, put_load
from tests.bench.starting import STARTING, start_and_load
from tests.support.cli import clean_environment

HERE: Final = Path(__file__).parents[2]
NEW, OLD = "this", "other"
DEMO_CONTEXT: Final = 1024
OPEN_RATE: Final = 1.5
"""Requests a second of cases whose requests arrive by themselves."""

JUDGED: Final = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p99_s")
"""What clients see; the median time between tokens is nothing where messages carry several."""
MORE_IS_BETTER: Final = "tokens_per_s"
WORSE: Final = 1.03

ALONE: Final = (
    Case("one", "one stream at a time, 128 in, 64 out", make_closed(8, 128, 64)),
    Case("long", "one stream at a time, 768 in, 8 out", make_closed(4, 768, 8)),
)
"""Put by one client, on both models."""

Rounds = dict[str, list[Measures]]


def python_of(tree: Path) -> str:
    """Return the interpreter that has a tree's packages."""
    return sys.executable if tree == HERE else str(tree / ".venv" / "bin" / "python")


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
    trees: Mapping[str, Path],
    folder: Path,
    name: str,
    *,
    context: int,
    cases: Sequence[Case],
    rounds: int,
    alone: Sequence[Case] = ALONE,
) -> list[str]:
    """Compare what both trees serve of the model in `folder`; return JSON lines."""
    async with AsyncExitStack() as stack:
        sides = {
            key: await stack.enter_async_context(
                our_side(folder, rows_max=CLIENTS, context=context, python=python_of(tree))
            )
            for key, tree in trees.items()
        }
        pair = Pair(folder, sides)
        lines: list[str] = []
        for some, clients in ((alone, 1), (cases, CLIENTS)):
            for case in some:
                measured = await pair.compare(case, rounds=rounds, clients=clients)
                lines += judge(f"{name}.{case.key}", measured, JUDGED)
        return lines


async def loading_lines(trees: Mapping[str, Path], folder: Path, *, rounds: int) -> list[str]:
    """Compare how fast each tree's loader is with cached files; `folder` takes 1.4 GB."""
    plain, packed = folder / "plain", folder / "packed"
    await _run(HERE, "write", str(plain), str(packed))
    lines: list[str] = []
    draws, names = random.Random(SEED), list(trees)
    for form in FORMS:
        took: Rounds = {name: [] for name in names}
        for number in range(rounds + 1):
            draws.shuffle(names)
            for name in names:
                model = packed if form == "q4" else plain
                figures = json.loads(await _run(trees[name], "ours", form, str(model)))
                if number:  # the first one brings the files into the cache
                    took[name].append(figures)
        lines += judge(f"loads.{form}", took, ("took_s",))
    return lines


async def starting_lines(trees: Mapping[str, Path], *, rounds: int) -> list[str]:
    """Compare how fast each tree's server listens, and loads the demo model."""
    took: Rounds = {name: [] for name in trees}
    draws, names = random.Random(SEED), list(trees)
    for number in range(rounds + 1):
        draws.shuffle(names)
        for name in names:
            figures = await start_and_load(python_of(trees[name]))
            if number:  # the first one compiles what has changed, and brings files into the cache
                took[name].append(figures)
    return judge("start", took, STARTING)


async def _run(tree: Path, *arguments: str) -> str:
    """Run a tree's own `load_side`; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(python_of(tree), "-m", "tests.bench.load_side", *arguments),
        cwd=tree,
        env=clean_environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {process.returncode} in {tree}")
    return out.decode()


def judge(key: str, measured: Mapping[str, Sequence[Measures]], names: Sequence[str]) -> list[str]:
    """Return JSON lines of medians and their ratios; show them, and which are worse."""
    lines = []
    for name in names:
        middle = {
            side: statistics.median(run[name] for run in runs) for side, runs in measured.items()
        }
        ratio = middle[NEW] / middle[OLD]
        worse = (1 / ratio if name == MORE_IS_BETTER else ratio) > WORSE
        sys.stderr.write(
            f"  {f'{key}.{name}':32s} {middle[OLD]:10.4f} -> {middle[NEW]:10.4f}"
            f"  {ratio:5.3f}{'  worse' if worse else ''}\n"
        )
        lines.append(
            json_line(
                "against", key=f"against.{key}.{name}", this=middle[NEW], other=middle[OLD],
                ratio=ratio, worse=worse, runs=len(measured[NEW]),
            )
        )  # fmt: skip
    return lines


async def main() -> None:
    """Compare starts, one stream, the cases of the server bench, and loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="another checkout, set up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list("abcdef"))
    parser.add_argument("--models", nargs="*", choices=("demo", "llama"), default=["demo", "llama"])
    parser.add_argument("--load-rounds", type=int, default=9, help="0: none")
    parser.add_argument("--start-rounds", type=int, default=5, help="0: none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trees = {NEW: HERE, OLD: args.tree.resolve()}
    cases = [case for case in CASES if case.key in args.cases]
    lines = [json_line("machine", **machine())]
    if args.start_rounds:
        lines += await starting_lines(trees, rounds=args.start_rounds)
    with tempfile.TemporaryDirectory() as folder:
        if "demo" in args.models:
            lines += await serving_lines(
                trees, DEMO, "demo", context=DEMO_CONTEXT, cases=(), rounds=4 * args.rounds
            )
        if "llama" in args.models:
            model = await float32_llama(Path(folder) / "llama")
            lines += await serving_lines(
                trees, model, "llama", context=CONTEXT, cases=cases, rounds=args.rounds
            )
        if args.load_rounds:
            lines += await loading_lines(trees, Path(folder), rounds=args.load_rounds)
    write_lines(lines, args.out)


if __name__ == "__main__":
    asyncio.run(main())
