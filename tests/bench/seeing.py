"""`python -m tests.bench.seeing --device cuda --out F`: what pictures cost a model that sees.

A random Qwen2.5-VL of the 7B's shape (`--shape tiny`: of a few thousand values) on disk, served by
a controller and its worker. Clients are processes of their own, which ask at the same moment: each
with a new picture of a megapixel, then with the same one, then with as many tokens of text. Before
that one client asks alone, which shows where a first token's time goes: decoding the file and all
else before the engine; the tower; the prefill of as many tokens. JSON lines go to F, or to standard
output, a table to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from mlxd import Client, LoadSpec, Weights
from tests.bench.report import json_line, machine
from tests.bench.seeing_client import READY, Asked, Came
from tests.bench.seeing_model import SHAPES, TOKENS_MAX, picture_paths
from tests.support.served import serve

MODEL = "sees"
ALONE = 3
LINE_NBYTES_MAX = 1 << 24


class Crowd:
    """The clients' processes."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def ask(self, requests: Sequence[Asked]) -> list[Came]:
        """Have each of the first clients ask its own, all at the same moment."""
        return await asyncio.gather(
            *(
                self._one(process, each)
                for process, each in zip(self._processes, requests, strict=False)
            )
        )

    async def _one(self, process: asyncio.subprocess.Process, request: Asked) -> Came:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            message = "a client has ended"
            raise RuntimeError(message)
        return msgspec.json.decode(line, type=Came)


@asynccontextmanager
async def start_crowd(address: str, clients: int) -> AsyncIterator[Crowd]:
    """Start the clients; end them behind the body."""
    command = (sys.executable, "-m", "tests.bench.seeing_client", address, MODEL)
    processes = [
        await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=LINE_NBYTES_MAX,
        )
        for _ in range(clients)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode().strip()
            assert line == READY, line
        yield Crowd(processes)
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            await process.wait()


def measure_crowd(came: Sequence[Came], new: int) -> dict[str, float]:
    """Return the figures of clients that asked at once."""
    took_s = max(each.last_s for each in came) - min(each.sent_s for each in came)
    ttft_s = sorted(each.first_s - each.sent_s for each in came)
    return {
        "tokens_per_s": len(came) * new / took_s,
        "ttft_p50_s": statistics.median(ttft_s),
        "ttft_max_s": ttft_s[-1],
        "completion_p50_s": statistics.median(each.completion_s for each in came),
        "prompt_tokens": statistics.median(each.prompt_tokens for each in came),
        "cached_tokens": statistics.median(each.cached_tokens for each in came),
    }


def split_first_token(pictures: Sequence[Came], texts: Sequence[Came]) -> dict[str, float]:
    """Return where a first token's time goes, of one client alone with pictures and with texts."""

    def before(came: Came) -> float:
        return came.first_s - came.sent_s - came.prompt_s

    prefill_s = statistics.median(each.prompt_s for each in texts)
    seen_s = statistics.median(each.prompt_s for each in pictures)
    return {
        "ttft_s": statistics.median(each.first_s - each.sent_s for each in pictures),
        "text_ttft_s": statistics.median(each.first_s - each.sent_s for each in texts),
        "file_s": statistics.median(map(before, pictures)) - statistics.median(map(before, texts)),
        "tower_s": seen_s - prefill_s,
        "prefill_s": prefill_s,
    }


async def measure(server: str, pictures: Sequence[Path], args: argparse.Namespace) -> list[str]:
    """Return the lines of a server whose model is loaded. pictures: one for each new asking."""
    draws, left = random.Random(1), iter(pictures)
    lines: list[str] = []
    async with start_crowd(server, args.clients) as clients:

        def show() -> Asked:
            return Asked(args.new, picture=str(next(left)))

        def read(count: int) -> Asked:
            return Asked(args.new, ids=[draws.randrange(3, TOKENS_MAX) for _ in range(count)])

        (warm,) = await clients.ask([show()])
        count = warm.prompt_tokens
        await clients.ask([read(count)])
        seen = [(await clients.ask([show()]))[0] for _ in range(ALONE)]
        texts = [(await clients.ask([read(count)]))[0] for _ in range(ALONE)]
        lines += report("alone", split_first_token(seen, texts))
        rounds: dict[str, list[dict[str, float]]] = {"new": [], "again": [], "text": []}
        for _ in range(args.runs):
            shown = [show() for _ in range(args.clients)]
            for name, requests in (
                ("new", shown), ("again", shown),
                ("text", [read(count) for _ in range(args.clients)]),
            ):  # fmt: skip
                rounds[name].append(measure_crowd(await clients.ask(requests), args.new))
    for name, runs in rounds.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        lines += report(f"{name}.{args.clients}", medians)
    return lines


def report(name: str, figures: dict[str, float]) -> list[str]:
    """Write a row of the table; return its lines."""
    sys.stderr.write(f"seeing {name}: " + " ".join(f"{k} {v:.4f}" for k, v in figures.items()))
    sys.stderr.write("\n")
    sys.stderr.flush()
    return [json_line("seeing", key=f"seeing.{name}.{k}", value=v) for k, v in figures.items()]


async def run(args: argparse.Namespace, folder: Path) -> list[str]:
    """Make model and pictures, serve, and measure; return JSON lines."""
    shape, path = SHAPES[args.shape], folder / args.shape
    began_s = time.monotonic()
    count = 1 + ALONE + args.runs * args.clients
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.seeing_model"),
        *(str(path), args.shape, str(count), str(args.side)),
    )
    if await process.wait():
        message = "the random model could not be written"
        raise RuntimeError(message)
    pictures = picture_paths(path, count)
    lines = [json_line("machine", **machine()), json_line("seeing", **vars(args) | {"folder": ""})]
    lines += report("made", {"s": time.monotonic() - began_s})
    weights = Weights.STORED if args.device == "cuda" else Weights.FLOAT32
    options = LoadSpec(
        weights=weights, rows_max=args.clients, context_length=shape.context, pinned=True
    )
    async with serve("--model", f"{MODEL}={path}") as server, Client(server.address) as client:
        began_s = time.monotonic()
        async with client.load(MODEL, options=options) as updates:
            async for _ in updates:
                pass
        lines += report("loaded", {"s": time.monotonic() - began_s})
        lines += await measure(server.address, pictures, args)
    return lines


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--shape", choices=list(SHAPES), help="by default 7b; tiny on a CPU")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--new", type=int, help="tokens an answer has: by default 128; 16")
    parser.add_argument("--side", type=int, help="of a picture, in pixels: by default 1000; 280")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where model and pictures are kept")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.shape = args.shape or ("tiny" if on_cpu else "7b")
    args.new = args.new or (16 if on_cpu else 128)
    args.side = args.side or (280 if on_cpu else 1000)
    return args


def main() -> None:
    """Print the lines, or write them."""
    args = arguments()
    out, args.out = args.out, ""
    with tempfile.TemporaryDirectory() as temporary:
        lines = asyncio.run(run(args, args.folder or Path(temporary)))
    text = "".join(f"{each}\n" for each in lines)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
