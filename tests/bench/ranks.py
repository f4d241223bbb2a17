"""`python -m tests.bench.ranks --ranks N`: one model over N devices of this host, by a controller.

First what a sum over the ranks takes, and how fast a device reads weights; then, served by one
controller, the tokens of an 8 B model over N ranks beside one device's; then a 70 B model, whose
ranks the controller chooses: its fit, its load, steps with few rows beside the floor that bytes and
sums set, a prompt of 8,192 tokens, each rank's memory, and a stream that outlives a rank.
Weights are random bfloat16 (`ranks_weights`). Each line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mlxd import Client, Delta, FitReport, LoadSpec, MlxdError, SamplingOptions
from mlxd_controller.cli.commands.serving.serve import LISTENING
from mlxd_controller.memory.device import usable_gpus
from mlxd_shared.domain.devices import DeviceKind
from tests.bench.ranks_machine import ROWS, measure_machine, tell
from tests.support.cli import clean_environment

PROMPT = 8192
TIE = 0.15
"""Two best log-probabilities of a random bfloat16 model that are nearer than this are a tie."""
START_S = 120.0
SHAPES = {
    # hidden, layers, heads, kv heads, mlp, vocabulary
    "tiny": (512, 4, 8, 8, 1024, 8192),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
    "70b-half": (8192, 40, 64, 8, 28672, 128256),
}


def config_of(name: str) -> dict[str, object]:
    """Return the config.json of a shape."""
    hidden, layers, heads, kv_heads, mlp, vocab = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": 2 * PROMPT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


@asynccontextmanager
async def serve(models: dict[str, Path]) -> AsyncIterator[Client]:
    """Serve the models by a controller whose workers have random weights."""
    options = [f"--model={name}={folder}" for name, folder in models.items()]
    command = [sys.executable, "-m", "tests.bench.ranks_worker", "serve"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--address", "127.0.0.1:0", "--keep-alive", "1h", "--log-level", "warning", *options),
        stdout=asyncio.subprocess.PIPE,
        env=clean_environment(),
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode().strip()
        if not line.startswith(LISTENING):
            raise SystemExit(f"the controller does not listen: {line}")
        async with Client(line.removeprefix(LISTENING), timeout_s=600.0) as client:
            yield client
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()


@dataclass
class Heard:
    """One stream: its tokens, when each piece came, and how near the second best was."""

    ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    times: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many tokens there were then."""


async def generate(
    client: Client,
    model: str,
    prompt: int,
    tokens: int,
    *,
    number: int,
    ties: bool = False,
    begun: asyncio.Event | None = None,
) -> Heard:
    """Generate greedily after a prompt of its own, so many tokens long; `begun` is set then."""
    heard = Heard()
    ids = tuple((7 * at + 31 * number) % 4000 for at in range(prompt))
    stream = client.generate(
        ids,
        model=model,
        sampling=SamplingOptions(temperature=0.0),
        max_tokens=tokens,
        ignore_eos=True,
        speculation_depth=0,
        logprobs=2 if ties else None,
    )
    async with stream as events:
        async for event in events:
            if isinstance(event, Delta):
                if begun is not None:
                    begun.set()
                heard.ids += event.token_ids
                heard.times.append((time.monotonic(), len(heard.ids)))
                heard.gaps += [p.top[0].logprob - p.top[1].logprob for p in event.logprobs]
    return heard


async def load(client: Client, model: str, spec: LoadSpec) -> None:
    """Load, and tell how long that took, and what each rank holds."""
    began_s = time.monotonic()
    async with client.load(model, options=spec) as updates:
        async for update in updates:
            loaded = update.model
    took_s = time.monotonic() - began_s
    (worker,) = [w for w in (await client.status(model)).workers if w.exit_code is None]
    holds = [(r.device, r.mlx_active_nbytes, r.mlx_peak_nbytes) for r in worker.memory.ranks]
    holds = holds or [
        (loaded.device, worker.memory.mlx_active_nbytes, worker.memory.mlx_peak_nbytes)
    ]
    tell(
        part="load",
        model=model,
        ranks=loaded.ranks,
        device=loaded.device,
        s=round(took_s, 1),
        weights=loaded.weights.value,
        gib=[[name, round(now / 2**30, 2), round(peak / 2**30, 2)] for name, now, peak in holds],
    )


def compare(one: list[Heard], many: list[Heard]) -> None:
    """Tell how far streams are equal, and whether the first difference is a tie."""
    for a, b in zip(one, many, strict=True):
        pairs = enumerate(zip(a.ids, b.ids, strict=True))
        at = next((i for i, (x, y) in pairs if x != y), None)
        gap = None if at is None else round(a.gaps[at], 4)
        tell(part="equal", tokens=len(a.ids), differs_at=at, gap=gap, ok=gap is None or gap < TIE)


async def time_tokens(client: Client, ranks: int) -> None:
    """Tell whether so many ranks draw one device's tokens, 8 streams side by side."""
    outcomes = []
    for count in (1, ranks):
        spec = LoadSpec(context_length=1024, rows_max=8, prefix_cache_nbytes=0, ranks=count)
        await load(client, "small", spec)
        began_s = time.monotonic()
        streams = (
            generate(client, "small", 20 + 50 * number, 64, number=number, ties=True)
            for number in range(8)
        )
        outcomes.append(await asyncio.gather(*streams))
        tell(part="tokens", ranks=count, s=round(time.monotonic() - began_s, 2))
        await client.unload("small", force=True)
    compare(*outcomes)


async def plan_large(client: Client, spec: LoadSpec) -> tuple[str, FitReport]:
    """Return the largest of the models that fits, and how."""
    for model in ("large", "half"):
        fit = await client.fit(model, options=spec)
        tell(
            part="fit",
            model=model,
            ranks=fit.ranks,
            device=fit.device,
            rank_need_gib=round(fit.need_nbytes / 2**30, 2),
            rank_budget_gib=round(fit.budget_nbytes / 2**30, 2),
            terms={term.name: round(term.nbytes / 2**30, 2) for term in fit.terms},
            fits=fit.fits_ever,
        )
        if fit.fits_ever:
            break
    return model, fit


async def time_steps(client: Client, model: str, tokens: int, floors: dict[int, float]) -> None:
    """Tell what a step takes with few rows, beside its floor in milliseconds."""
    for rows in ROWS:
        for attempt in range(2):  # once to warm up
            numbers = range(100 * attempt + 10 * rows, 100 * attempt + 11 * rows)
            streams = [generate(client, model, 16, tokens, number=number) for number in numbers]
            heard = await asyncio.gather(*streams)
        # From the moment at which all have begun to the one at which the first has ended.
        first_s = max(each.times[0][0] for each in heard)
        steps = [
            ((end_s - begin_s) / (end - begin))
            for each in heard
            for (begin_s, begin), (end_s, end) in [
                (next(t for t in each.times if t[0] >= first_s), each.times[-1])
            ]
            if end > begin
        ]
        ms = sum(steps) / len(steps) * 1e3
        floor = floors[rows]
        ratio = round(ms / floor, 2)
        tell(part="step", rows=rows, ms=round(ms, 2), floor_ms=round(floor, 2), ratio=ratio)


async def time_prompts(client: Client, model: str, prompt: int) -> None:
    """Tell what a long prompt takes to its first token."""
    for number in (900, 901):
        began_s = time.monotonic()
        await generate(client, model, prompt, 1, number=number)
        tell(part="prompt", tokens=prompt, s=round(time.monotonic() - began_s, 2), number=number)


async def kill_rank(client: Client, model: str, tokens: int) -> None:
    """Kill the last rank in the middle of a stream, which goes on; tell how long each took."""
    whole = await generate(client, model, 16, tokens, number=950)
    (worker,) = [w for w in (await client.status(model)).workers if w.exit_code is None]
    pids = [rank.pid for rank in worker.memory.ranks]
    begun = asyncio.Event()
    stream = asyncio.create_task(generate(client, model, 16, tokens, number=950, begun=begun))
    await begun.wait()
    killed_s = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    await asyncio.to_thread(wait_gone, pids)
    ended_s = time.monotonic() - killed_s
    heard = await stream
    after = [at_s for at_s, _ in heard.times if at_s > killed_s + ended_s]
    tell(
        part="killed",
        group_ends_s=round(ended_s, 2),
        next_token_s=round(after[0] - killed_s, 2) if after else None,
        tokens=len(heard.ids),
        equal=heard.ids == whole.ids,
    )


def wait_gone(pids: list[int]) -> None:
    """Wait until none of the processes lives."""
    pause = threading.Event()
    while any(psutil.pid_exists(pid) for pid in pids):
        pause.wait(0.01)


def device_memory() -> list[str]:
    """Return what nvidia-smi says that each GPU's memory in use is; [] without it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
    except (OSError, subprocess.CalledProcessError):
        return []


async def run(options: argparse.Namespace, kind: DeviceKind, models: dict[str, Path]) -> None:
    """Run all parts."""
    sums, rate = await asyncio.to_thread(
        measure_machine, options.ranks, kind, SHAPES[options.large][0]
    )
    context = options.prompt + 256
    async with serve(models) as client:
        await time_tokens(client, options.ranks)
        # On a CPU no number of ranks is chosen: they would share one memory.
        ranks = options.ranks if kind is DeviceKind.CPU else None
        spec = LoadSpec(context_length=context, rows_max=8, prefix_cache_nbytes=0, ranks=ranks)
        model, fit = await plan_large(client, spec)
        if not fit.fits_ever:
            tell(part="end", reason="nothing fits")
            return
        await load(client, model, spec)
        shape = options.large if model == "large" else options.half
        hidden, layers, *_, vocab = SHAPES[shape]
        item = 4 if kind is DeviceKind.CPU else 2
        read = next(term.nbytes for term in fit.terms if term.name == "weights")
        read -= hidden * vocab * item  # of the embedding a step reads a row
        floors = {
            rows: read / rate * 1e3 + (2 * layers * sums[rows] / 1e3 if fit.ranks > 1 else 0.0)
            for rows in ROWS
        }
        await time_steps(client, model, options.tokens, floors)
        await time_prompts(client, model, options.prompt)
        tell(part="memory", devices=device_memory())
        if fit.ranks > 1:
            await kill_rank(client, model, 4 * options.tokens)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(prog="ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", default="8b", choices=SHAPES)
    parser.add_argument("--large", default="70b", choices=SHAPES)
    parser.add_argument("--half", default="70b-half", choices=SHAPES, help="if that does not fit")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    options = parser.parse_args()
    began_s = time.monotonic()
    kind = DeviceKind.CUDA if usable_gpus(os.environ) else DeviceKind.CPU
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: Path(scratch) / name for name in ("small", "large", "half")}
        shapes = (options.small, options.large, options.half)
        subprocess.run(  # in a process of its own: this one has no MLX
            [sys.executable, "-m", "tests.bench.ranks_weights", scratch, *shapes], check=True
        )
        try:
            asyncio.run(run(options, kind, models))
        except MlxdError as error:
            tell(part="failed", error=error.describe())
            raise
    tell(part="end", s=round(time.monotonic() - began_s, 1))


if __name__ == "__main__":
    main()
