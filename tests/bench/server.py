"""Our gRPC against mlx-lm's HTTP server: the same loads from the same generator, in turn.

One controller with one worker and one server of mlx-lm, on one model and one BLAS, serve all cases;
(g) alone starts mlx-lm once more, with the BLAS it brings. While one side computes the other is
idle. Each run has prompts of its own, the same for both sides, and starts after a few short
requests that nobody times. Ratios are of medians, ours to mlx-lm's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlxd_controller.bench.requests import Request
from mlxd_shared.ops.measuring import Measures, Outcome, measures, medians
from tests.bench.azure import TRACE
from tests.bench.cases import CASES, CLIENTS, CONTEXT, LOAD_FRACTION, Case, make_closed
from tests.bench.gguf_file import KINDS
from tests.bench.prompts import Prompts
from tests.bench.report import json_line, machine, write_lines
from tests.bench.sides import Side, llama_side, our_side, peer_side, put_load

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
SEED = 20260101
SETTLING = 2
SATURATION_REQUESTS = 64
_SHOWN = (
    "tokens_per_s", "decode_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s",
)  # fmt: skip


@dataclass(slots=True)
class Found:
    """The runs of one case."""

    ours: list[Measures] = field(default_factory=list)
    peer: list[Measures] = field(default_factory=list)
    rivals: dict[str, list[Measures]] = field(default_factory=dict)
    same_texts: int = 0
    texts: int = 0


class Bench:
    """Runs cases on both sides."""

    def __init__(self, folder: Path, ours: Side, peer: Side, rivals: Mapping[str, Side]) -> None:
        self._prompts = Prompts(folder, seed=SEED)
        self._draws = random.Random(SEED)
        self._ours = ours
        self._peer = peer
        self._rivals = rivals

    async def run(self, case: Case, *, runs: int, peer: Side | None = None) -> Found:
        """Measure a case in alternating runs, against `peer` where that is another one."""
        findings, other = Found(), peer or self._peer
        rate = await self._sustain(case) * LOAD_FRACTION if case.open_loop else 1.0
        for number in range(min(runs, case.runs_max or runs)):
            requests = _at_rate(case.make(self._prompts, self._draws), rate)
            sides = [(self._ours, findings.ours), (other, findings.peer)]
            outcomes: list[list[Outcome]] = []
            for side, into in sides if number % 2 else reversed(sides):
                outcomes.append(await self._load(side, requests))
                into.append(measures(outcomes[-1]))
            for name, rival in self._rivals.items():
                measured = measures(await self._load(rival, requests))
                findings.rivals.setdefault(name, []).append(measured)
            pairs = list(zip(*outcomes, strict=True))
            findings.same_texts += sum(_alike(one, two) for one, two in pairs)
            findings.texts += len(pairs)
            sys.stderr.write(f"\rserver {case.key} {number + 1}/{runs} ")
        sys.stderr.write("\n")
        return findings

    async def _sustain(self, case: Case) -> float:
        """Return how many of a case's requests a second mlx-lm serves with every client busy."""
        requests = case.make(self._prompts, self._draws)
        requests = [replace(r, at_s=None) for r in requests[:SATURATION_REQUESTS]]
        return measures(await self._load(self._peer, requests))["requests_per_s"]

    async def _load(self, side: Side, requests: Sequence[Request]) -> list[Outcome]:
        settling = make_closed(SETTLING, 16, 8)(self._prompts, self._draws)
        return await put_load(side, requests, settling=settling)


async def server_lines(
    folder: Path, *, cases: Sequence[Case], runs: int, llama: Sequence[str] = ()
) -> list[str]:
    """Measure the model in `folder`; return JSON lines. llama: kinds of GGUF for llama.cpp."""
    lines: list[str] = []
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(our_side(folder, rows_max=CLIENTS, context=CONTEXT))
        peer = await stack.enter_async_context(peer_side(folder, blas="ours"))
        rivals = {
            f"llama.cpp {kind}": await stack.enter_async_context(
                llama_side(folder, folder / f"{kind}.gguf", kind, rows_max=CLIENTS, context=CONTEXT)
            )
            for kind in llama
        }
        bench = Bench(folder, ours, peer, rivals)
        for case in cases:
            if case.shipped_blas:
                async with peer_side(folder, blas="shipped") as shipped:
                    findings = await bench.run(case, runs=runs, peer=shipped)
            else:
                findings = await bench.run(case, runs=runs)
            lines += _report(case, findings)
    return lines


def chosen_cases(letters: str) -> list[Case]:
    """Return the cases of `all`, `none`, or letters and `trace` with commas between.

    The trace is left out where it is not there.

    Raises:
        ValueError: there is no such case.
    """
    known = {case.key: case for case in CASES}
    keys = {"all": list(known), "none": []}.get(letters, letters.split(","))
    unknown = [key for key in keys if key not in known]
    if unknown:
        message = f"no case {unknown[0]!r}; there are all, none, {', '.join(known)}"
        raise ValueError(message)
    if "trace" in keys and not TRACE.exists():
        sys.stderr.write(f"no {TRACE.name}: the real trace is left out\n")
        keys.remove("trace")
    return [known[key] for key in keys]


def _at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """Return requests that arrived once a second on average, now at `rate` a second."""
    return [r if r.at_s is None else replace(r, at_s=r.at_s / rate) for r in requests]


def _report(case: Case, findings: Found) -> list[str]:
    """Write the case's table; return its lines."""
    ours, peer = medians(findings.ours), medians(findings.peer)
    targets = {target.measure: target for target in case.targets}
    sys.stderr.write(
        f"server {case.key}: {case.title}; {CLIENTS} connections, medians of {len(findings.ours)}, "
        f"same text in {findings.same_texts} of {findings.texts}\n"
    )
    lines = [
        json_line(
            "server",
            key=f"server.{case.key}.same_texts",
            value=findings.same_texts,
            of=findings.texts,
            runs=len(findings.ours),
        )
    ]
    for name in ours:
        if name not in peer:
            continue
        ratio = ours[name] / peer[name] if peer[name] else 0.0
        for side, value in (("ours", ours[name]), ("peer", peer[name]), ("ratio", ratio)):
            lines.append(json_line("server", key=f"server.{case.key}.{name}.{side}", value=value))
        target = targets.get(name)
        if name in _SHOWN or target is not None:
            judged = "" if target is None else f"{target!s:>9s} {_word(met=target.is_met(ratio))}"
            sys.stderr.write(
                f"  {name:22s} {ours[name]:10.4f} {peer[name]:10.4f} {ratio:8.3f} {judged}\n"
            )
    for rival, runs in findings.rivals.items():
        lines += _report_rival(case, ours, rival, medians(runs))
    return lines


def _report_rival(case: Case, ours: Measures, rival: str, theirs: Measures) -> list[str]:
    """Write our measures beside a rival's; return the lines."""
    lines: list[str] = []
    key = f"server.{case.key}.{rival.replace(' ', '-')}"
    sys.stderr.write(f"  beside {rival}\n")
    for name in sorted(set(ours) & set(theirs)):
        ratio = ours[name] / theirs[name] if theirs[name] else 0.0
        lines.append(json_line("server", key=f"{key}.{name}", value=theirs[name]))
        lines.append(json_line("server", key=f"{key}.{name}.ratio", value=ratio))
        if name in _SHOWN:
            sys.stderr.write(f"  {name:22s} {ours[name]:10.4f} {theirs[name]:10.4f} {ratio:8.3f}\n")
    return lines


def _alike(one: Outcome, two: Outcome) -> bool:
    # mlx-lm drops a space at the start of a text.
    return one.text.lstrip(" ") == two.text.lstrip(" ")


def _word(*, met: bool) -> str:
    return "met" if met else "NOT MET"


async def float32_llama(folder: Path) -> Path:
    """Write the random model in float32, in a process of its own; this one imports no MLX."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.models", str(folder), str(DEMO), str(SEED)),
        *(str(2 * CONTEXT), "float32"),
    )
    if await process.wait():
        message = "the random model could not be written"
        raise RuntimeError(message)
    return folder


async def main() -> None:
    """Measure by itself: `python -m tests.bench.server`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=chosen_cases, default="all", help="such as a,b,trace")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--llama", choices=KINDS, nargs="*", default=(), help="llama.cpp beside")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = await float32_llama(Path(folder) / "random-llama")
        report_lines = await server_lines(model, cases=args.cases, runs=args.runs, llama=args.llama)
    write_lines([json_line("machine", **machine()), *report_lines], args.out)


if __name__ == "__main__":
    asyncio.run(main())
