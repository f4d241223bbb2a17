"""`python -m tests.bench.device`: decode on a GPU, our engine against mlx-lm's loops in turn.

The model is made in memory, random, of a well-known shape, bfloat16 or quantised there; both sides
hold the same values. Sides run in turn, medians of steps over all rounds. One JSON object a line on
standard output. On a CPU `--model tiny` shows that it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping

import mlx.core as mx

from mlxd_shared.config import ROWS_MAX_DEFAULT
from mlxd_worker.cache.base import LayerCache
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Model
from tests.bench.device_models import (
    SHAPES,
    Shape,
    make_ours,
    make_peer,
    named_parameters,
    prompts_of,
)
from tests.bench.device_parts import (
    WithoutAttention,
    copy_bytes_per_s,
    logits_difference,
    step_s,
    times_s,
)
from tests.bench.device_sides import Measured, Ours, PeerBatches, PeerLoop, Side

OURS, PEER, PLAIN = "ours", "peer", "uncompiled"
FORMS = ("bf16", "q4")


class Bench:
    """One model on the device, in both sides' hands."""

    def __init__(self, args: argparse.Namespace, form: str) -> None:
        """Make the model."""
        self.args = args
        self.form = form
        self.shape: Shape = SHAPES[args.model]
        dtype = mx.float32 if runs_cpu() else mx.bfloat16
        self.peer = make_peer(self.shape, packed=form == "q4", dtype=dtype, seed=args.seed)
        self.ours: Model = make_ours(self.shape, self.peer)
        self.peer_nbytes = sum(array.nbytes for array in named_parameters(self.peer).values())
        self.ours_nbytes = sum(array.nbytes for array in self.ours.parameters().values())

    def compare(self, rows: int) -> Mapping[str, list[Measured]]:
        """Run all sides in turn; the first round is untimed."""
        args = self.args
        sides: dict[str, Side] = {
            OURS: self._engine(rows, compiled=True),
            PEER: PeerLoop(self.peer) if rows == 1 else PeerBatches(self.peer),
        }
        if args.plain:
            sides[PLAIN] = self._engine(rows, compiled=False)
        by_side: dict[str, list[Measured]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name in list(sides) if number % 2 else list(reversed(sides)):
                prompts = prompts_of(self.shape, rows=rows, tokens=args.prompt, seed=number)
                steps = args.steps if number else args.warm_steps
                measured = sides[name].run(prompts, steps=steps)
                if number:
                    by_side[name].append(measured)
                progress(f"{self.form} b{rows} {name} {number}/{args.rounds}")
        return by_side

    def step_nbytes(self, rows: int) -> int:
        """Return the bytes that a step must read: all weights but the table, and the positions."""
        named = self.ours.parameters()
        weights: int = sum(array.nbytes for array in named.values())
        if not self.shape.tied:
            table = (n for n in named if n.startswith("model.embed_tokens"))
            weights -= sum(named[name].nbytes for name in table)
        length = self.args.prompt + self.args.steps // 2
        kv = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * 2
        return int(weights + rows * length * kv)

    def parts(self, rows: int) -> dict[str, float]:
        """Return what a step and its parts take, in seconds."""
        return {
            "step": self._step(rows, KVCache),
            "step_ahead": self._step(rows, KVCache, ahead=True),
            "without_attention": self._step(rows, WithoutAttention),
            "without_attention_ahead": self._step(rows, WithoutAttention, ahead=True),
            "head": self._head_s(rows),
        }

    def ahead(self, rows: int, length: int) -> dict[str, float]:
        """Return a step read at once, and one dispatched before the last is read."""
        context = max(2 * length, 1024)
        figures: dict[str, float] = {}
        for name, ahead in (("at_once", False), ("ahead", True)):
            layers = self.ours.new_caches(context_max=context)
            took_s, peak_nbytes = step_s(
                self.ours, layers, rows=rows, length=length, steps=self.args.steps,
                context=context, ahead=ahead,
            )  # fmt: skip
            figures |= {f"{name}_ms": took_s * 1e3, f"{name}_peak_nbytes": peak_nbytes}
        return figures

    def _engine(self, rows: int, *, compiled: bool) -> Ours:
        rows_max = max(rows, self.args.rows_max)
        return Ours(self.ours, rows_max=rows_max, context=self.args.context, compiled=compiled)

    def _step(self, rows: int, kind: type[KVCache], *, ahead: bool = False) -> float:
        shape, dtype = self.shape, self.ours.dtype
        layers: list[LayerCache | None] = [
            kind(kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype)
            for _ in range(shape.layers)
        ]
        context, length = self.args.context, self.args.prompt
        seconds, _ = step_s(
            self.ours,
            layers,
            rows=rows,
            length=length,
            steps=self.args.steps,
            context=context,
            ahead=ahead,
        )
        return seconds

    def _head_s(self, rows: int) -> float:
        hidden = mx.random.normal((rows, self.shape.hidden)).astype(self.ours.dtype)

        def once() -> None:
            mx.eval(mx.argmax(self.ours.logits(hidden), axis=-1))

        return statistics.median(times_s(once, repeats=20))


def compare_sides(bench: Bench, rows: int, copied: float) -> Iterable[str]:
    """Yield the lines of one comparison."""
    args = bench.args
    by_side = bench.compare(rows)
    steps_s = {
        name: statistics.median(s for one in rounds for s in one.steps_s)
        for name, rounds in by_side.items()
    }
    other_nbytes = {OURS: bench.peer_nbytes, PLAIN: bench.peer_nbytes, PEER: bench.ours_nbytes}
    key = f"device.{args.model}.{bench.form}.b{rows}"
    for name, took_s in steps_s.items():
        yield _line(key=f"{key}.{name}_tokens_per_s", value=rows / took_s)
        yield _line(key=f"{key}.{name}_step_ms", value=took_s * 1e3)
        peak = max(one.peak_nbytes for one in by_side[name]) - other_nbytes[name]
        yield _line(key=f"{key}.{name}_peak_gib", value=peak / (1 << 30))
    yield _line(key=f"{key}.ratio_tokens_per_s", value=steps_s[PEER] / steps_s[OURS])
    floor_s = bench.step_nbytes(rows) / copied
    yield _line(key=f"{key}.floor_ms", value=floor_s * 1e3)
    yield _line(key=f"{key}.step_per_floor", value=steps_s[OURS] / floor_s)
    same = [_alike(a.ids, b.ids) for a, b in zip(by_side[OURS], by_side[PEER], strict=True)]
    yield _line(key=f"{key}.tokens_alike", value=statistics.mean(same))


def _alike(left: list[int], right: list[int]) -> int:
    """Return how many tokens two streams begin with alike."""
    pairs = list(zip(left, right, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _line(*, key: str, value: float) -> str:
    return json.dumps({"kind": "device", "key": key, "value": value})


def progress(text: str) -> None:
    """Tell whoever waits."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def lines(args: argparse.Namespace) -> Iterable[str]:
    """Yield everything that was asked for."""
    copied = copy_bytes_per_s(args.copy_mib << 20)
    yield _line(key="device.copy_gb_per_s", value=copied / 1e9)
    for form in args.forms:
        bench = Bench(args, form)
        for rows in args.batches:
            key = f"device.{args.model}.{form}.b{rows}"
            if args.check:
                difference = logits_difference(
                    bench.ours, rows=rows, length=args.prompt, steps=4, context=args.context
                )
                yield _line(key=f"{key}.logits_difference", value=difference)
            if not args.no_compare:
                yield from compare_sides(bench, rows, copied)
            if args.parts:
                for name, took_s in bench.parts(rows).items():
                    yield _line(key=f"{key}.part.{name}_ms", value=took_s * 1e3)
            for length in args.ahead:
                for name, value in bench.ahead(rows, length).items():
                    yield _line(key=f"{key}.t{length}.{name}", value=value)
        del bench
        mx.clear_cache()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows-max", type=int, default=ROWS_MAX_DEFAULT)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--warm-steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--copy-mib", type=int, default=4096)
    parser.add_argument("--plain", action="store_true", help="our engine uncompiled, too")
    parser.add_argument("--check", action="store_true", help="compiled logits against plain ones")
    parser.add_argument("--parts", action="store_true", help="where a step's time goes")
    parser.add_argument("--ahead", nargs="*", type=int, default=[], help="run-ahead at lengths")
    parser.add_argument("--no-compare", action="store_true", help="leave mlx-lm out")
    return parser.parse_args(argv)


def main() -> None:
    """Print the lines as they come."""
    for line in lines(arguments()):
        print(line, flush=True)  # noqa: T201 - the report


if __name__ == "__main__":
    main()
