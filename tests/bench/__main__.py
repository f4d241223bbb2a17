"""`python -m tests.bench`: one stream, every way to the same tokens, medians of alternating runs.

Each round runs every way once, in an order of its own, so that drift of the machine hits all alike;
a short run of the same way, untimed and of another prompt, goes before each. One JSON object a line
goes to --out or standard output, a table to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import grpc

from mlxd.v1 import model_pb2, model_pb2_grpc, status_pb2, status_pb2_grpc, types_pb2
from mlxd_shared.ops.measuring import Outcome
from tests.bench.chat import WIDTHS, chat_lines
from tests.bench.curves import draw_all
from tests.bench.disk_replay import BUDGETS_PERCENT as DISK_PERCENT
from tests.bench.disk_replay import disk_lines
from tests.bench.eviction import eviction_lines
from tests.bench.loads import RUNS, load_lines
from tests.bench.mixed import CONTEXT, mixed_lines
from tests.bench.prefixes import BUDGETS_PERCENT, prefix_lines
from tests.bench.report import Figures, figures, json_line, machine, table, write_lines
from tests.bench.server import DEMO, chosen_cases, float32_llama, server_lines
from tests.bench.speculation import ROUNDS, speculation_lines
from tests.bench.ways import GrpcWay, PeerWay, Way
from tests.support.served import serve

SETTLING_TOKENS = 16
CONTROLLER, WORKER = "mlxd: controller", "mlxd: worker directly"
PEER, SHIPPED = "mlx-lm, float32, same BLAS", "mlx-lm as shipped (bf16)"


async def random_llama(folder: Path, *, context: int = 2048) -> Path:
    """Write the random model in a process of its own; this one imports no MLX."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.models", str(folder), str(DEMO), "20260101", str(context)
    )
    if await process.wait():
        message = "the random model could not be written"
        raise RuntimeError(message)
    return folder


async def worker_address(controller: str, model: str) -> str:
    """Load `model` and return the socket of the worker that serves it."""
    async with grpc.aio.insecure_channel(controller) as channel:
        options = types_pb2.LoadOptions(weights=types_pb2.WEIGHTS_FORMAT_FLOAT32)
        request = model_pb2.LoadModelRequest(model=model, options=options)
        async for _ in model_pb2_grpc.ModelServiceStub(channel).LoadModel(request):
            pass
        stub: status_pb2_grpc.StatusServiceAsyncStub = status_pb2_grpc.StatusServiceStub(channel)
        got = await stub.GetStatus(status_pb2.GetStatusRequest(model=model))
        return got.status.workers[0].address


@asynccontextmanager
async def all_ways(folder: Path, *, peers: tuple[str, ...]) -> AsyncIterator[dict[str, Way]]:
    """Start everything that is compared, on one model."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve("--model", f"bench={folder}"))
        address = await worker_address(server.address, "bench")
        ways: dict[str, Way] = {
            CONTROLLER: GrpcWay(server.address, "bench"),
            WORKER: GrpcWay(address, "bench"),
        }
        if PEER in peers:
            ways[PEER] = await PeerWay.start(folder, blas="ours", dtype="float32")
        if SHIPPED in peers:
            ways[SHIPPED] = await PeerWay.start(folder, blas="shipped", dtype="stored")
        for way in ways.values():
            stack.push_async_callback(way.close)
        yield ways


async def measure(
    ways: dict[str, Way], *, prompt_tokens: int, new_tokens: int, runs: int, vocabulary: int
) -> dict[str, Figures]:
    """Return each way's medians over `runs` alternating runs, after one warm-up run each."""
    draws = random.Random(7)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in ways}
    names = list(ways)
    for run in range(runs + 1):
        draws.shuffle(names)
        for name in names:
            # A prompt of its own: the worker remembers, and two of the ways lead to one worker.
            prompt = [draws.randrange(1, vocabulary) for _ in range(prompt_tokens)]
            # The way before leaves spinning BLAS threads and cold caches: not this one's to pay.
            await ways[name].run(prompt[::-1], SETTLING_TOKENS)
            outcome = await ways[name].run(prompt, new_tokens)
            assert outcome.tokens == new_tokens, (name, outcome.tokens)
            if run:
                outcomes[name].append(outcome)
        sys.stderr.write(f"\rrun {run}/{runs} ")
    sys.stderr.write("\n")
    return {name: figures(outcomes[name], prompt_tokens) for name in ways}


def ratios(measured: dict[str, Figures], new_tokens: int) -> dict[str, float]:
    """Return what the figures are judged by."""
    through, direct = measured[CONTROLLER], measured[WORKER]
    added_s = (through.decode_s - direct.decode_s) / (new_tokens - 1)
    result = {
        "decode: controller / worker": through.decode_tokens_per_s / direct.decode_tokens_per_s,
        "added microseconds a message": added_s * 1e6,
    }
    for peer in (PEER, SHIPPED):
        if peer in measured:
            other = measured[peer]
            decode = through.decode_tokens_per_s / other.decode_tokens_per_s
            prefill = through.prefill_tokens_per_s / other.prefill_tokens_per_s
            result |= {f"decode: controller / {peer}": decode}
            result |= {f"prefill: controller / {peer}": prefill}
    return result


async def compare(name: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """Measure one model; return its JSON lines."""
    peers = (PEER, SHIPPED) if name != "demo" else (PEER,)
    sizes = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    async with all_ways(folder, peers=peers) as ways:
        measured = await measure(ways, runs=args.runs, vocabulary=4096, **sizes)
    judged = ratios(measured, args.new_tokens)
    sys.stderr.write(table(f"{name}: {sizes}, medians of {args.runs}", measured) + "\n")
    sys.stderr.writelines(f"  {key:44s} {value:8.2f}\n" for key, value in judged.items())
    lines = [json_line("way", model=name, way=way, **asdict(f)) for way, f in measured.items()]
    lines += [json_line("ratio", model=name, key=key, value=v) for key, v in judged.items()]
    return lines


async def main() -> None:
    """Measure one stream, chats, mixed lengths, guessing, loads, servers, caches, eviction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--model", choices=["random", "demo", "both", "none"], default="both")
    parser.add_argument("--chat", choices=["demo", "100MB", "both", "none"], default="both")
    parser.add_argument("--mixed-rounds", type=int, default=2, help="of mixed lengths; 0: none")
    parser.add_argument(
        "--prefix-budgets", type=int, nargs="*", default=BUDGETS_PERCENT, metavar="PERCENT"
    )
    parser.add_argument(
        "--disk-budgets", type=int, nargs="*", default=DISK_PERCENT, metavar="PERCENT"
    )
    parser.add_argument(
        "--server", type=chosen_cases, default="all", help="all, none, or cases such as a,b,trace"
    )
    parser.add_argument("--server-runs", type=int, default=5)
    parser.add_argument("--load-runs", type=int, default=RUNS, help="of models of 1 GB; 0: none")
    parser.add_argument("--speculation-rounds", type=int, default=ROUNDS, help="0: none")
    parser.add_argument("--eviction", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the figures, as SVG")
    args = parser.parse_args()
    lines = [json_line("machine", **machine())]
    with tempfile.TemporaryDirectory() as folder:
        if args.model in ("random", "both"):
            model = await random_llama(Path(folder) / "random-llama")
            lines += await compare("random-llama-100MB", model, args)
        if args.model in ("demo", "both"):
            lines += await compare("demo", DEMO, args)
        widths = tuple(width for width in WIDTHS if args.chat in (width, "both"))
        lines += await chat_lines(Path(folder), widths=widths)
        if args.mixed_rounds:
            model = await random_llama(Path(folder) / "mixed", context=CONTEXT)
            lines += await mixed_lines(model, rounds=args.mixed_rounds)
        if args.speculation_rounds:
            models = {"demo": DEMO, "random": await random_llama(Path(folder) / "speculation")}
            lines += await speculation_lines(models, rounds=args.speculation_rounds)
        if args.load_runs:
            lines += await load_lines(Path(folder) / "loads", runs=args.load_runs)
        if args.server:
            model = await float32_llama(Path(folder) / "float32")
            lines += await server_lines(model, cases=args.server, runs=args.server_runs)
    if args.prefix_budgets:
        lines += prefix_lines(args.prefix_budgets)
    if args.disk_budgets:
        lines += disk_lines(args.disk_budgets)
    if args.eviction:
        lines += eviction_lines()
    write_lines(lines, args.out)
    if args.pictures is not None:
        draw_all(map(json.loads, lines), args.pictures)


if __name__ == "__main__":
    asyncio.run(main())
