"""Models through mlx-lm, as a section of docs/models.md: `python -m tests.worker.zoo_conformance`.

The figure is the larger of two: a prompt in chunks and one by one, and rows of unlike lengths that
decode together, each against mlx-lm's own single row, in float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_models.sizes.zoo_types import ZOO_TYPES, ZOO_VERSION
from mlxd_worker.models.loader import load_model
from tests.worker.tiny import ignore_progress
from tests.worker.zoo import (
    APART,
    CONFIGS,
    REFUSED,
    UNTRIED,
    Peer,
    inspect_folder,
    prefilled_error,
    ragged_error,
    write_zoo,
    zoo_config,
)

TABLE: Final = Path(__file__).parents[2] / "docs" / "models.md"
HEADING: Final = "## Through mlx-lm"
INTRODUCTION: Final = (
    f"With the extra `zoo`, every type of model that mlx-lm {ZOO_VERSION} knows and mlxd has no",
    "architecture for (`python -m tests.worker.zoo_conformance`). These are the configurations of",
    "mlx-lm's own tests, some of them narrower, and a small one of every other type; those whose",
    "type is above go through it here too. The figure is the larger of a prompt in chunks and of",
    "rows that decode together. What is refused, here on a CPU, is refused by name before a weight",
    "is read. Where it says so, rows decode one by one: the type takes no batch of unlike lengths.",
)


def line(name: str) -> str:
    """Return one type's row."""
    if name in REFUSED:
        return f"| `{name}` | refused: {REFUSED[name]} | |"
    if name in UNTRIED:
        return f"| `{name}` | not tried: {UNTRIED[name]} | |"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_zoo(Path(scratch), zoo_config(name))
        model = load_model(inspect_folder(folder), form=FloatType.F32, progress=ignore_progress)
        peer = Peer(folder)
        worst = max(prefilled_error(model, peer), ragged_error(model, peer))
    kinds = {cache.kind.value for cache in model.new_caches() if cache is not None}
    kinds_text = ", ".join(sorted(kinds)) + "; row by row" * (name in APART)
    return f"| `{name}` | {kinds_text} | {f'{worst:.0e}' if worst else '0'} |"


def section() -> str:
    """Return the section."""
    lines = [
        HEADING,
        "",
        *INTRODUCTION,
        "",
        "| type | caches | error |",
        "|---|---|---|",
        *(line(name) for name in sorted(ZOO_TYPES | CONFIGS.keys())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the section into the file, in place of what is there."""
    before = TABLE.read_text(encoding="utf-8").partition(f"\n{HEADING}")[0].rstrip("\n")
    TABLE.write_text(f"{before}\n\n{section()}", encoding="utf-8")
    sys.stdout.write(section_of(TABLE))


def section_of(table: Path) -> str:
    """Return the section as it is written."""
    return HEADING + table.read_text(encoding="utf-8").partition(f"\n{HEADING}")[2]


if __name__ == "__main__":
    main()
