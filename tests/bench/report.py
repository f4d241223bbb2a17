"""From timings to ratios of medians: JSON lines for machines, a table for people."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mlxd_shared.ops.machine import processor_name
from mlxd_shared.ops.measuring import Outcome


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of one way's runs."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_s: float
    decode_s: float
    tokens_per_message: float


def figures(outcomes: Sequence[Outcome], prompt_tokens: int) -> Figures:
    """Return the medians over lone streams after prompts of `prompt_tokens`."""
    ttft_s = statistics.median(outcome.ttft_s for outcome in outcomes)
    decode_s = statistics.median(outcome.decode_s for outcome in outcomes)
    tokens = outcomes[0].tokens
    return Figures(
        prefill_tokens_per_s=prompt_tokens / ttft_s,
        decode_tokens_per_s=(tokens - 1) / decode_s,
        ttft_s=ttft_s,
        decode_s=decode_s,
        tokens_per_message=statistics.median(o.tokens / len(o.stamps_s) for o in outcomes),
    )


def machine() -> dict[str, str]:
    """Return what a reader needs to place the figures."""
    packages = ("mlxd", "mlx", "mlx-lm", "grpcio", "protobuf", "scipy-openblas32")
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "python": platform.python_version(),
        "blas kernels": os.environ.get("OPENBLAS_CORETYPE", "the library's own choice"),
        **{name: metadata.version(name) for name in packages if _is_installed(name)},
    }


def _is_installed(package: str) -> bool:
    """Tell whether a package is there: a GPU needs no BLAS, and a server no peer."""
    return next(iter(metadata.distributions(name=package)), None) is not None


def write_lines(lines: Iterable[str], out: Path | None) -> None:
    """Write the report to a file, or to standard output."""
    text = "".join(f"{line}\n" for line in lines)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")


def json_line(kind: str, **values: object) -> str:
    """Return one line of the machine-readable report."""
    return json.dumps({"kind": kind, **values})


def table(title: str, rows: Mapping[str, Figures]) -> str:
    """Return the figures of each way, one a line."""
    lines = [
        title,
        f"  {'way':34s} {'prefill tok/s':>14s} {'TTFT ms':>9s} {'decode tok/s':>13s}",
    ]
    lines += [
        f"  {name:34s} {f.prefill_tokens_per_s:14.0f} {f.ttft_s * 1e3:9.1f} "
        f"{f.decode_tokens_per_s:13.1f}"
        for name, f in rows.items()
    ]
    return "\n".join(lines)
