"""`python -m tests.bench.ranks --ranks N`: one model over N devices of this host.

First what a sum over the ranks takes; then the tokens of an 8 B model beside one device's; then a
70 B model: a step with few rows, a prompt of 8,192 tokens, each rank's memory, and a rank killed.
Weights are random bfloat16 (`ranks_weights`). Each part is a process, so that none leaves a trace.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.requests import LoadSpec, Sampling
from mlxd_worker.distributed.group import Group, join_group, make_group
from mlxd_worker.engine.request import Event, Failed, Finished, StreamId, Submit, Tokens
from mlxd_worker.machine.backend import prepare_backend
from mlxd_worker.thread.facts import LoadJob
from tests.worker.distributed.leading import pid_of

PROMPT = 8192
TIE = 0.15
"""Two best log-probabilities of a random bfloat16 model that are nearer than this are a tie."""
SHAPES = {
    # hidden, layers, heads, kv heads, mlp, vocabulary
    "tiny": (512, 4, 8, 8, 1024, 4096),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
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


class Heard:
    """A sink that keeps tokens and their alternatives."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.gaps: list[float] = []

    def put(self, event: Event) -> None:
        """Keep it."""
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Tokens | Finished)
        self.ids += event.ids
        for its in event.logprobs:
            self.gaps.append(its.top[0].logprob - its.top[1].logprob)


def stream(number: int, prompt: int, tokens: int, sink: Heard, *, ties: bool = False) -> Submit:
    """Return a greedy stream of that many tokens after a prompt of its own."""
    return Submit(
        stream=StreamId(number),
        prompt=tuple((7 * at + 31 * number) % 4000 for at in range(prompt)),
        sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=number),
        max_tokens=tokens,
        submitted_s=time.monotonic(),
        sink=sink,
        top_logprobs=2 if ties else None,
        speculation_depth=0,
    )


def open_host(ranks: int, folder: Path) -> tuple[Any, float]:
    """Return a host with the model, and what loading took."""
    kind = prepare_backend().kind
    group = make_group(ranks, kind) if ranks > 1 else None
    if group is not None:
        os.environ.update(group.environment(0))
    from tests.bench.ranks_weights import read_random  # noqa: PLC0415 - after the BLAS

    read_random()
    from mlxd_worker.distributed.leader import LeaderHost  # noqa: PLC0415
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415

    host: ModelHost
    if group is not None:
        host = LeaderHost(kind, group=group, module="tests.bench.ranks_follower")
    else:
        host = ModelHost(device=kind)
    began_s = time.monotonic()
    spec = LoadSpec(context_length=PROMPT + 256, rows_max=8, prefix_cache_nbytes=0)
    host.load(LoadJob(folder, "random", "d" * 64, spec), lambda _: None)
    return host, time.monotonic() - began_s


def run_to_end(host: Any) -> float:
    """Step until nothing is left; return the seconds."""
    began_s = time.monotonic()
    while host.busy:
        host.step()
    return time.monotonic() - began_s


def tell(**values: object) -> None:
    """Print one line of results."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def time_sums(rank: int, ranks: int, hidden: int) -> None:
    """Tell what a sum takes in a chain of 64, by rows, as one rank of a group that is set up."""
    kind = prepare_backend().kind
    share = join_group(rank, ranks, kind)
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS

    for rows in (1, 8, 32, 2048):
        ones = mx.ones((rows, hidden), mx.bfloat16)

        def chain(ones: mx.array = ones) -> mx.array:
            out = ones
            for _ in range(64):
                out = share.add(out) * 0.5
            return out

        mx.eval(chain(), chain())
        began_s = time.monotonic()
        for _ in range(5):
            mx.eval(chain())
        each_us = (time.monotonic() - began_s) / 5 / 64 * 1e6
        if rank == 0:
            tell(part="sum", ranks=ranks, rows=rows, hidden=hidden, us=round(each_us, 1))


def time_tokens(ranks: int, folder: Path) -> None:
    """Tell the tokens of 8 streams, and how near the second best was."""
    host, load_s = open_host(ranks, folder)
    sinks = [Heard() for _ in range(8)]
    for number, sink in enumerate(sinks):
        host.submit(stream(number, 20 + 50 * number, 64, sink, ties=True))
    run_s = run_to_end(host)
    tell(part="tokens", ranks=ranks, load_s=round(load_s, 1), run_s=round(run_s, 2))
    tell(ids=[sink.ids for sink in sinks], gaps=[sink.gaps for sink in sinks])


def time_speed(ranks: int, folder: Path, tokens: int) -> None:
    """Tell steps, a prompt and memory; kill a rank then, and be ended by that."""
    host, load_s = open_host(ranks, folder)
    figures = host.figures()
    gib = round(figures.mlx_active_nbytes / 2**30, 2)
    tell(part="load", ranks=ranks, load_s=round(load_s, 1), rank_gib=gib)
    for rows in (1, 8):
        for number, count in ((1, 8), (2, tokens)):  # once to warm up
            for row in range(rows):
                host.submit(stream(number * 100 + rows * 10 + row, 16, count, Heard()))
            took_s = run_to_end(host)
        tell(part="step", ranks=ranks, rows=rows, ms=round(took_s / tokens * 1e3, 2))
    for number in (900, 901):
        host.submit(stream(number, PROMPT, 1, Heard()))
        took_s = run_to_end(host)
        tell(part="prompt", ranks=ranks, tokens=PROMPT, s=round(took_s, 2), number=number)
    peak = round(host.figures().mlx_peak_nbytes / 2**30, 2)
    tell(part="memory", ranks=ranks, rank_peak_gib=peak, devices=_device_memory())
    if ranks == 1:
        return
    host.submit(stream(950, 16, 4096, Heard()))
    for _ in range(20):
        host.step()
    tell(part="kill", at_s=time.time())
    os.kill(pid_of(ranks - 1), signal.SIGKILL)
    run_to_end(host)


def _device_memory() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
    except (OSError, subprocess.CalledProcessError):
        return []


def child(*arguments: object, group: Group | None = None, rank: int = 0) -> subprocess.Popen[str]:
    """Start a part; as a rank of `group`, if one is given."""
    command = [sys.executable, "-m", "tests.bench.ranks", *map(str, arguments)]
    environ = {**os.environ, **(group.environment(rank) if group else {})}
    fds = group.descriptors if group else ()
    return subprocess.Popen(command, env=environ, pass_fds=fds, stdout=subprocess.PIPE, text=True)


def listen(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Pass a part's lines on; return their values."""
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout if line.startswith("{")]
    for line in lines:
        if "part" in line:
            tell(**line)
    process.wait()
    return lines


def compare(one: list[dict[str, Any]], many: list[dict[str, Any]]) -> None:
    """Tell how far streams are equal, and whether the first difference is a tie."""
    first, second = one[-1], many[-1]
    for a, b, gaps in zip(first["ids"], second["ids"], first["gaps"], strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        gap = None if at is None else round(gaps[at], 4)
        tell(part="equal", tokens=len(a), differs_at=at, gap=gap, ok=gap is None or gap < TIE)


def main() -> None:
    """Run all parts, or the one that is named."""
    parser = argparse.ArgumentParser(prog="ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", default="8b", choices=SHAPES)
    parser.add_argument("--large", default="70b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--part", choices=["sum", "tokens", "speed"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    hidden = SHAPES[options.large][0]
    parts: dict[str, Callable[[], None]] = {
        "sum": lambda: time_sums(options.rank, options.ranks, hidden),
        "tokens": lambda: time_tokens(options.ranks, options.folder),
        "speed": lambda: time_speed(options.ranks, options.folder, options.tokens),
    }
    if options.part:
        parts[options.part]()
        return
    kind = prepare_backend().kind
    from tests.bench.ranks_weights import write_model  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as scratch:
        small, large = Path(scratch) / "small", Path(scratch) / "large"
        write_model(small, config_of(options.small))
        nbytes = write_model(large, config_of(options.large))
        tell(part="model", shape=options.large, gb=round(nbytes / 1e9, 1), device=kind.value)
        _run_parts(options, kind, small, large)


def _run_parts(options: argparse.Namespace, kind: DeviceKind, small: Path, large: Path) -> None:
    ranks, shared = options.ranks, ["--large", options.large, "--tokens", options.tokens]
    group = make_group(ranks, kind)
    sums = [
        child("--part", "sum", "--rank", r, "--ranks", ranks, *shared, group=group, rank=r)
        for r in range(ranks)
    ]
    for process in sums:
        listen(process)
    outcomes = [
        listen(child("--part", "tokens", "--ranks", count, "--folder", small))
        for count in (1, ranks)
    ]
    compare(*outcomes)
    process = child("--part", "speed", "--ranks", ranks, "--folder", large, *shared)
    lines = listen(process)
    ended_s = time.time() - lines[-1].get("at_s", 0.0)
    tell(part="killed", exit_code=process.returncode, seconds=round(ended_s, 2))


if __name__ == "__main__":
    main()
