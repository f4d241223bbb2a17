"""How fast a model is loaded, and what beyond its weights that takes, against MLX alone.

A Llama of 1 GB in bfloat16, and the same in 4 bits, each in several files. In turn, each load in a
process of its own: the worker's loader, and a bare `mx.load` with what makes the same arrays of it,
evaluated at once; but ours also checks every header, joins what is multiplied together, reports its
progress and keeps to a bound of memory. Once with the files in the system's cache, once without.
Both sides' medians; the speed of ours is theirs over ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.bench.report import json_line, machine

FORMS: Mapping[str, str] = {
    "stored": "bf16, as stored",
    "float32": "bf16 to float32",
    "q4": "4 bits to float32",
}
SPEED_MIN = 0.9
"""Promised with the files in the system's cache."""

BEYOND_NBYTES = 64 << 20
"""What the peak may be beyond the weights and the largest of them in both forms."""

RUNS = 5

Figures = Mapping[str, float]


async def load_lines(
    folder: Path, *, runs: int = RUNS, cold_runs: int = 3, forms: Collection[str] = tuple(FORMS)
) -> list[str]:
    """Measure; return the JSON lines. `folder` takes 1.4 GB."""
    plain, packed = folder / "plain", folder / "packed"
    await _side("write", str(plain), str(packed))
    _flush(folder)
    lines: list[str] = []
    for form in forms:
        model = packed if form == "q4" else plain
        for cold in (False, True):
            figures = await _alternating(form, model, runs=cold_runs if cold else runs, cold=cold)
            lines += _judge(form, figures, cold=cold)
    return lines


async def _alternating(
    form: str, model: Path, *, runs: int, cold: bool
) -> dict[str, list[Figures]]:
    by_way: dict[str, list[Figures]] = {"ours": [], "bare": []}
    for run in range(runs + (not cold)):
        for way in ("ours", "bare") if run % 2 else ("bare", "ours"):
            if cold:
                _forget(model)
            figures = await _side(way, form, str(model))
            if cold or run:  # the first one brings the files into the cache
                by_way[way].append(figures)
    return by_way


def _judge(form: str, by_way: Mapping[str, list[Figures]], *, cold: bool) -> list[str]:
    ours_s, bare_s = (
        statistics.median(run["took_s"] for run in by_way[way]) for way in ("ours", "bare")
    )
    values: dict[str, float] = {"ours_s": ours_s, "bare_s": bare_s, "speed": bare_s / ours_s}
    text = f"{FORMS[form]}, {'cold' if cold else 'cached'}"
    if not cold:
        peak = max(by_way["ours"], key=lambda run: run["beyond_nbytes"])
        values["beyond_nbytes"] = peak["beyond_nbytes"]
        values["beyond_allowed_nbytes"] = peak["largest_nbytes"] + BEYOND_NBYTES
        values["bare_beyond_nbytes"] = max(run["beyond_nbytes"] for run in by_way["bare"])
    sys.stderr.write(
        f"  {text:28s} ours {ours_s:6.3f} s  MLX alone {bare_s:6.3f} s  "
        f"speed {bare_s / ours_s:5.2f}{'' if cold else f'  (>= {SPEED_MIN})'}\n"
    )
    for way in by_way:
        runs = " ".join(f"{run['took_s']:.3f}" for run in by_way[way])
        sys.stderr.write(f"    {way}: {runs}\n")
    when = "cold" if cold else "cached"
    return [
        json_line("loads", key=f"loads.{form}.{when}.{name}", value=value)
        for name, value in values.items()
    ]


async def _side(*arguments: str) -> Figures:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.load_side", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
        message = f"a load ended with code {process.returncode}"
        raise RuntimeError(message)
    figures: Figures = json.loads(out) if out else {}
    return figures


def _flush(folder: Path) -> None:
    """Have all files of a folder on the disk: what is not there yet cannot be forgotten."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _forget(model: Path) -> None:
    """Let the system forget what it has cached of a model's files."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def main() -> None:
    """Measure loads alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=tuple(FORMS))
    parser.add_argument("--folder", type=Path, help="where models are written; else a new one")
    args = parser.parse_args()
    sys.stdout.write(json_line("machine", **machine()) + "\n")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        lines = await load_lines(Path(folder), runs=args.runs, forms=args.forms)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    asyncio.run(main())
