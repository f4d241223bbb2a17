"""A bench's report: a table for people, and a file to share that has nothing private in it.

Invariants:
- The file names machine, versions, the model's digest, sizes and figures; no path, no host, no
  user, and no name that somebody gave to a model.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from mlxd_controller.bench.cells import Figure, Plan
from mlxd_models.families.foreign import MLX_LM
from mlxd_models.families.foreign_parts import installed_version
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.ops.backends import installed_versions
from mlxd_shared.ops.machine import processor_name

VERSION: Final = 1
PEER_DISTRIBUTION: Final = "mlx-lm"
HEADINGS: Final = (
    "way", "prompt", "rows", "prefill tok/s", "first ms", "decode tok/s", "gap ms", "gap p99 ms",
    "peak",
)  # fmt: skip


def table_rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """Return a row of cells for each figure, in the order of `HEADINGS`; a dash for no value."""
    return [
        (
            figure.way,
            str(figure.prompt_tokens),
            str(figure.rows),
            _cell(figure, "prefill_tokens_per_s"),
            _cell(figure, "ttft_p50_s", scale=1e3, digits=2),
            _cell(figure, "decode_tokens_per_s"),
            _cell(figure, "itl_p50_s", scale=1e3, digits=2),
            _cell(figure, "itl_p99_s", scale=1e3, digits=2),
            format_bytes(figure.peak_nbytes) if figure.peak_nbytes else "-",
        )
        for figure in figures
    ]


def report_of(
    figures: Sequence[Figure], plan: Plan, *, digest: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole report for programs. `facts`: what the engine reports of itself."""
    return {
        "mlxd_bench": VERSION,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": processor_name(),
            "device": facts["device"],
            "blas": facts["blas"],
        },
        "versions": versions(),
        "model": {"digest": digest, "weights": facts["weights"]},
        "settings": {"new_tokens": plan.new_tokens, "runs": plan.runs},
        "figures": [asdict(figure) for figure in figures],
    }


def versions() -> dict[str, str]:
    """Return the versions that figures depend on."""
    known = {"mlxd": importlib.metadata.version("mlxd"), "python": platform.python_version()}
    peer = installed_version(MLX_LM)
    return known | installed_versions() | ({} if peer is None else {PEER_DISTRIBUTION: peer})


def _cell(figure: Figure, name: str, *, scale: float = 1.0, digits: int = 1) -> str:
    value = figure.values.get(name)
    return "-" if value is None else f"{value * scale:.{digits}f}"
