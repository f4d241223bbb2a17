"""What prompts on disk are worth: first tokens after every end of a worker; others' steps.

    python -m tests.bench.outliving [--parts first steps decode kinds] [--out FILE] [sizes]

A real controller with a random Llama of about 100 MB, on this machine's CPU, and a prompt that
begins with 32,000 tokens; `--shape 8b` is for a machine with a GPU. Four parts, in this order; each
writes its figures as soon as it has them, so that a run that is cut off still gives some:

- `first`: the time to the first token, once cold (minutes on two cores: alone it is a mean over
  tens of thousands of tokens), then by turns, medians: from memory, after an unload, an eviction, a
  `kill -9` of the worker, a restart of the controller. One prompt serves all of them. What is read
  comes from the disk and not from the system's copies, and the tokens must be the cold ones.
- `steps`: the p99 of another stream's steps alone, and while 2 GiB of blocks are read, and written.
- `decode`: the step of a lone stream with the tier on and off, by turns.
- `kinds`: every kind of memory and the trained models, small: equal tokens (`outliving_kinds`).

For a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mlxd_shared.blocks.chain import BLOCK_TOKENS
from mlxd_shared.domain.requests import LoadSpec
from tests.bench.outliving_kinds import check_same, measure_kinds
from tests.bench.outliving_server import (
    Offered,
    ask,
    drop_pages,
    end_by_kill,
    end_by_unload,
    make_ready,
    prompt_of,
    serving,
    whole_blocks,
    worker_of,
    write,
    write_models,
)
from tests.bench.outliving_steps import measure_decode, measure_steps
from tests.bench.report import json_line, machine

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
BEGINNING_TOKENS = 32_000
REST_TOKENS = 40
"""Of a prompt, behind the beginning: they are evaluated each time."""
SPARE_TOKENS = 984
"""Of the context, behind the beginning."""
TOKEN_NBYTES: Mapping[str, int] = MappingProxyType(
    {"small": 32 << 10, "tiny": 1 << 10, "0.6b": 56 << 10, "8b": 128 << 10}
)
"""Of keys and values of the models of `tests.bench.models`: in float32 on a CPU, for which the
first two are, in bfloat16 on a GPU, for which the others are."""
PREFIX_SPARE = 1.25
"""Memory for prompts, in such prompts: what is on disk is compared with what is in memory."""
MODEL, OTHER = "long", "other"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often."""

    tokens: int = BEGINNING_TOKENS
    shape: str = "small"
    runs: int = 3
    """Of each end of a worker."""
    steps: int = 600
    """Of the stream that is timed alone; those beside the disk are as many as that takes."""
    moved_nbytes: int = 2 << 30
    """So much at least is read, and so much written, beside others' steps."""
    rounds: int = 7
    """Of a stream with the tier on, and one with it off."""
    kinds: tuple[str, ...] = ()
    """Kinds of memory; none: all."""

    @property
    def spec(self) -> LoadSpec:
        """How the long model is loaded, with memory for one such prompt."""
        return LoadSpec(
            context_length=self.tokens + SPARE_TOKENS,
            rows_max=2,
            prefix_cache_nbytes=int(PREFIX_SPARE * self.tokens * TOKEN_NBYTES[self.shape]),
        )

    @property
    def prompt(self) -> list[int]:
        """The one prompt of all parts: its beginning, and a rest."""
        return prompt_of(self.tokens + REST_TOKENS, seed=1)


Measured = AsyncIterator[tuple[str, float]]
Part = Callable[[Path, Sizes], Measured]


async def measure_first_tokens(place: Path, sizes: Sizes) -> Measured:
    """Yield seconds to the first token, by what came before, and their shares of the cold one's.

    Raises:
        RuntimeError: a stream had other tokens than the cold one, or nothing was read for it.
    """
    model, prompt = long_model(place, sizes), sizes.prompt
    other = Offered(OTHER, place / OTHER)
    folder = place / "prefixes"
    times: dict[str, list[float]] = {"memory": [], "unload": [], "eviction": [], "kill": []}
    times["restart"] = []
    workers: set[int] = set()
    async with serving([model, other], folder) as client:
        await make_ready(client, model)
        cold = await ask(client, MODEL, prompt)
        yield "first_token_s.cold", cold.first_s
        for _ in range(sizes.runs):
            times["memory"].append((await ask(client, MODEL, prompt)).first_s)
        await write(client, MODEL, prompt, files=whole_blocks(prompt))
        workers.add((await worker_of(client, MODEL)).pid)
    for run in range(sizes.runs):
        async with serving([model, other], folder) as client:
            for end in ("restart", "unload", "eviction", "kill"):
                if end == "unload":
                    await end_by_unload(client, model)
                elif end == "eviction":
                    await make_ready(client, other)
                elif end == "kill":
                    await end_by_kill(client, model)
                await make_ready(client, model)
                _check_new(end, (await worker_of(client, MODEL)).pid, workers)
                drop_pages(folder)
                answer = await ask(client, MODEL, prompt)
                check_same(end, answer, cold)
                times[end].append(answer.first_s)
                _tell(f"run {run + 1}: after {end} {answer.first_s:.2f} s of {cold.first_s:.2f}")
    for name, seconds in times.items():
        yield f"first_token_s.{name}", statistics.median(seconds)
        yield f"first_token_s.{name}.most", max(seconds)
        yield f"first_token_of_cold.{name}", statistics.median(seconds) / cold.first_s


async def measure_others_steps(place: Path, sizes: Sizes) -> Measured:
    """Yield milliseconds of another stream's steps: alone, and while blocks are read and written.

    The long prompt is cut so that one token is left to evaluate: no prefill is beside the steps.
    """
    prompt = sizes.prompt[: sizes.tokens // BLOCK_TOKENS * BLOCK_TOKENS + 1]
    async for figure in measure_steps(
        long_model(place, sizes),
        place / "prefixes",
        prompt,
        steps=sizes.steps,
        moved_nbytes=sizes.moved_nbytes,
    ):
        yield figure


async def measure_lone_decode(place: Path, sizes: Sizes) -> Measured:
    """Yield milliseconds of a lone stream's step with the tier on and off, and their ratio."""
    model = long_model(place, sizes)
    async for figure in measure_decode(model, place / "prefixes", rounds=sizes.rounds):
        yield figure


async def measure_all_kinds(place: Path, sizes: Sizes) -> Measured:
    """Yield the tokens that were read, by kind of memory and by what came before."""
    async for name, tokens in measure_kinds(place, names=sizes.kinds):
        yield f"kinds.{name}.read_tokens", tokens


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "first": measure_first_tokens,
        "steps": measure_others_steps,
        "decode": measure_lone_decode,
        "kinds": measure_all_kinds,
    }
)


def long_model(place: Path, sizes: Sizes) -> Offered:
    """Return the model that is asked for the long prompt."""
    return Offered(MODEL, place / MODEL, sizes.spec)


async def measure(parts: Sequence[str], sizes: Sizes, note: Callable[[str], None]) -> None:
    """Measure some parts in a folder of their own; each figure is a JSON line for `note`."""
    with tempfile.TemporaryDirectory(prefix="mlxd-outliving-") as name:
        place = Path(name)
        context = str(sizes.tokens + SPARE_TOKENS)
        for seed, folder, shape in (("1", MODEL, sizes.shape), ("2", OTHER, "tiny")):
            own = (str(place / folder), str(DEMO), seed, context, "bfloat16", shape)
            await write_models("tests.bench.models", *own)
        note(json_line("machine", **machine()))
        for part in parts:
            began_s = time.perf_counter()
            async for key, value in PARTS[part](place, sizes):
                note(json_line("disk", key=key, value=value))
            took_s = time.perf_counter() - began_s
            note(json_line("disk", key=f"{part}.took_s", value=took_s))
            _tell(f"{part}: {took_s:.0f} s")


def _check_new(end: str, pid: int, workers: set[int]) -> None:
    if pid in workers:
        message = f"{end}: the worker before has not ended"
        raise RuntimeError(message)
    workers.add(pid)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main() -> None:
    """Measure, and write JSON lines as they come."""
    sizes = Sizes()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--tokens", type=int, default=sizes.tokens, help="of the beginning")
    parser.add_argument("--shape", choices=[*TOKEN_NBYTES], default=sizes.shape)
    parser.add_argument("--runs", type=int, default=sizes.runs, help="of each end of a worker")
    parser.add_argument("--steps", type=int, default=sizes.steps, help="of the stream alone")
    parser.add_argument("--moved", type=int, default=sizes.moved_nbytes, help="bytes beside steps")
    parser.add_argument("--rounds", type=int, default=sizes.rounds, help="of decoding, on and off")
    parser.add_argument("--kinds", nargs="+", default=sizes.kinds, help="two or more; all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = Sizes(
        tokens=args.tokens,
        shape=args.shape,
        runs=args.runs,
        steps=args.steps,
        moved_nbytes=args.moved,
        rounds=args.rounds,
        kinds=tuple(args.kinds),
    )
    if args.out is None:
        await measure(args.parts, sizes, _print)
        return
    with args.out.open("w", encoding="utf-8") as out:

        def note(line: str) -> None:
            out.write(f"{line}\n")
            out.flush()

        await measure(args.parts, sizes, note)


if __name__ == "__main__":
    asyncio.run(main())
