"""One long row beside fifteen short ones: bytes of keys and values held, and time of a step.

Both sides run the same float32 model on the same BLAS in one process of their own, engine against
mlx-lm's BatchGenerator, in turn; a step counts while all sixteen rows decode and no prompt is left.
The long row ends at `LONG_TOKENS`, the short ones begin at `SHORT_TOKENS`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxd_models.sizes.weight_forms import FloatType
from tests.bench.report import json_line

LONG_TOKENS = 4096
SHORT_TOKENS = 64
ROWS = 16
STEPS = 64
CONTEXT = 8192
SHORT_STEPS = 2 * STEPS
"""Short rows decode longer, since they begin while the long prompt is still being read."""

OURS, PEER = "mlxd: engine", "mlx-lm: BatchGenerator"
_OUR_MODULES = ("models.loader", "memory.ledger", "cache.rows", "engine.loop",
                "engine.request", "engine.stepping.choose", "tokenizing.files")  # fmt: skip


@dataclass(slots=True)
class Measured:
    """The steps of one round, and what was held during the last of them."""

    steps_s: list[float]
    kv_nbytes: int = 0
    ids: list[int] | None = None
    """What the long row generated."""


def prompts_of(seed: int) -> list[list[int]]:
    """Return the short prompts, then the long one."""
    draws = random.Random(seed)
    lengths = [SHORT_TOKENS] * (ROWS - 1) + [LONG_TOKENS - STEPS]
    return [[draws.randrange(1, 4096) for _ in range(length)] for length in lengths]


class Ours:
    """The worker's engine on its own."""

    def __init__(self, folder: Path) -> None:
        modules = {name: importlib.import_module(f"mlxd_worker.{name}") for name in _OUR_MODULES}
        loader = modules["models.loader"]
        self._requests = modules["engine.request"]
        self._ledgers = modules["memory.ledger"]
        model = loader.load_model(
            loader.inspect_model(folder), form=FloatType.F32, progress=lambda *_: None
        )
        self._caches = modules["cache.rows"].RowCaches(
            model.new_caches(context_max=CONTEXT), context_max=CONTEXT, rows_max=ROWS
        )
        self._ledger = self._ledgers.Ledger()
        self._ledger.attach(self._ledgers.Account.KV, "rows", self._caches)
        tokenizer = modules["tokenizing.files"].load_tokenizer(folder)
        loop = modules["engine.loop"]
        self._engine = loop.Engine(
            model,
            self._caches,
            lambda request: tokenizer.detokenizer(skip_special=request.skip_special_tokens),
            loop.Limits(context_length=CONTEXT, rows_max=ROWS),
            stepper=modules["engine.stepping.choose"].choose(model, self._caches),
        )

    def run(self, prompts: list[list[int]]) -> Measured:
        """Serve the prompts to their ends."""
        sinks = [_Sink() for _ in prompts]
        for number, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
            self._submit(number, prompt, sink)
        measured = Measured([])
        while self._engine.busy:
            before = [len(sink.ids) for sink in sinks]
            started_s = time.perf_counter()
            self._engine.step()
            took_s = time.perf_counter() - started_s
            if all(len(s.ids) > n > 0 for s, n in zip(sinks, before, strict=True)):
                measured.steps_s.append(took_s)
                measured.kv_nbytes = max(measured.kv_nbytes, self._kv_nbytes())
        measured.ids = sinks[-1].ids
        return measured

    def _kv_nbytes(self) -> int:
        account = self._ledgers.Account.KV
        return sum(int(r.nbytes) for r in self._ledger.report() if r.name == account)

    def _submit(self, number: int, prompt: list[int], sink: _Sink) -> None:
        self._engine.submit(
            self._requests.Submit(
                stream=self._requests.StreamId(number),
                prompt=tuple(prompt),
                sampling=_greedy(),
                max_tokens=steps_of(prompt),
                stop=(),
                stop_token_ids=frozenset(),
                eos_ids=frozenset(),
                skip_special_tokens=True,
                submitted_s=0.0,
                sink=sink,
            )
        )


class Peer:
    """mlx-lm's continuous batching."""

    def __init__(self, folder: Path) -> None:
        mx = importlib.import_module("mlx.core")
        self._batches = importlib.import_module("mlx_lm.generate")
        self._model, _ = importlib.import_module("mlx_lm").load(str(folder))
        self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())

    def run(self, prompts: list[list[int]]) -> Measured:
        """Serve the prompts to their ends."""
        generator = self._batches.BatchGenerator(self._model, stop_tokens=[])
        uids = generator.insert(prompts, [steps_of(prompt) for prompt in prompts])
        ids: dict[int, list[int]] = {uid: [] for uid in uids}
        measured = Measured([])
        while any(len(ids[uid]) < steps_of(p) for uid, p in zip(uids, prompts, strict=True)):
            started_s = time.perf_counter()
            read, generated = generator.next()
            took_s = time.perf_counter() - started_s
            if len(generated) == ROWS and not read:
                measured.steps_s.append(took_s)
                measured.kv_nbytes = max(measured.kv_nbytes, generator.prompt_cache_nbytes)
            for response in generated:
                ids[response.uid].append(int(response.token))
        generator.close()
        measured.ids = ids[uids[-1]]
        return measured


class _Sink:
    """Keeps the ids of one stream."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, event: Any) -> None:
        """Take an event."""
        self.ids += event.ids

    def owe(self, tell: Any) -> None:
        """Take what is owed at once; trees before decision 0116 owe nothing."""
        for event in tell():
            self.put(event)


def steps_of(prompt: list[int]) -> int:
    """Return how many tokens follow a prompt."""
    return STEPS if len(prompt) > SHORT_TOKENS else SHORT_STEPS


def _greedy() -> Any:
    requests = importlib.import_module("mlxd_shared.domain.requests")
    return requests.Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def main() -> None:
    """Measure both in turn; one JSON object on standard output: FOLDER ROUNDS."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int)
    args = parser.parse_args()
    importlib.import_module("mlxd_worker.machine.blas").preload_blas()
    sides: dict[str, Ours | Peer] = {OURS: Ours(args.folder), PEER: Peer(args.folder)}
    by_side: dict[str, list[Measured]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            measured = sides[name].run(prompts_of(number))
            if number:
                by_side[name].append(measured)
        sys.stderr.write(f"\rmixed {number}/{args.rounds} ")
    sys.stderr.write("\n")
    same = [a.ids == b.ids for a, b in zip(*by_side.values(), strict=True)]
    report = {
        name: {
            "kv_nbytes": max(one.kv_nbytes for one in rounds),
            "step_s": statistics.median(s for one in rounds for s in one.steps_s),
            "steps": sum(len(one.steps_s) for one in rounds),
        }
        for name, rounds in by_side.items()
    }
    answer = {"sides": report, "same_ids": sum(same), "rounds": len(same)}
    print(json.dumps(answer))  # noqa: T201 - the protocol


async def mixed_lines(folder: Path, *, rounds: int) -> list[str]:
    """Measure the model in `folder`, in a process of its own; return JSON lines."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.mixed", str(folder), str(rounds),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    if process.returncode:
        message = f"the mixed lengths ended with code {process.returncode}"
        raise RuntimeError(message)
    report: dict[str, Any] = json.loads(out)
    sides = report["sides"]
    ours, peer = sides[OURS], sides[PEER]
    ratios = {
        "mixed.kv_bytes_ratio": ours["kv_nbytes"] / peer["kv_nbytes"],
        "mixed.step_ratio": ours["step_s"] / peer["step_s"],
    }
    sys.stderr.write(
        f"mixed: one row of {LONG_TOKENS} beside {ROWS - 1} of {SHORT_TOKENS}, "
        f"same tokens in {report['same_ids']} of {report['rounds']} rounds\n"
    )
    sys.stderr.writelines(
        f"  {name:24s} {side['kv_nbytes'] / (1 << 20):8.0f} MiB {side['step_s'] * 1e3:8.1f} ms\n"
        for name, side in sides.items()
    )
    sys.stderr.writelines(f"  {key:24s} {value:8.3f}\n" for key, value in ratios.items())
    lines = [json_line("mixed", way=name, **side) for name, side in sides.items()]
    model = "random-llama-100MB"
    return lines + [json_line("ratio", model=model, key=k, value=v) for k, v in ratios.items()]


if __name__ == "__main__":
    main()
