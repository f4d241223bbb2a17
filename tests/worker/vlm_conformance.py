"""Models through mlx-vlm, as a section of docs/models.md: `python -m tests.worker.vlm_conformance`.

The figure is the worst of a type's configurations: a prompt with three images in chunks that cut
them, decoded beside a text, against mlx-vlm's own single pass over each, in float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from mlxd_models.sizes.vlm_types import UNSERVED, VLM_TYPES, VLM_VERSION
from mlxd_models.sizes.zoo_types import zoo_type
from tests.worker import zoo_conformance
from tests.worker.tiny import load
from tests.worker.vlm import CASES, worst_error

TABLE: Final = zoo_conformance.TABLE
HEADING: Final = "## Through mlx-vlm"
INTRODUCTION: Final = (
    f"With the extra `vlm`, types of mlx-vlm {VLM_VERSION} that keep an image's shape and that",
    "mlxd has no architecture for (`python -m tests.worker.vlm_conformance`). An image takes at",
    "most 1,024 places. The figure is the worst of a type's configurations: prompts with three",
    "images in chunks that cut them, then decoded beside a text, against mlx-vlm called directly.",
)


def line(kind: str) -> str:
    """Return one type's row."""
    cases = [case for case in CASES if case.kind == kind]
    worst, kinds = 0.0, set[str]()
    for case in cases:
        with tempfile.TemporaryDirectory() as scratch:
            folder = case.write(Path(scratch), lively=True)
            model = load(folder)
            worst = max(worst, worst_error(case, folder, model))
            kinds |= {cache.kind.value for cache in model.new_caches() if cache is not None}
    turned = "three axes" if VLM_TYPES[kind].axes else "positions"
    return f"| `{kind}` | {', '.join(sorted(kinds))} | {turned} | {len(cases)} | {worst:.0e} |"


def refusal(kind: str) -> str:
    """Return the row of a type that is not served."""
    reads = zoo_type({"model_type": kind}) is not None
    left = "its text is served through mlx-lm" if reads else "refused"
    return f"| `{kind}` | {left}: it {UNSERVED[kind]} |"


def section() -> str:
    """Return the section."""
    lines = [
        HEADING,
        "",
        *INTRODUCTION,
        "",
        "| type | caches | tokens turn by | configurations | error |",
        "|---|---|---|---|---|",
        *(line(kind) for kind in sorted(VLM_TYPES)),
        "",
        "| type | not served |",
        "|---|---|",
        *(refusal(kind) for kind in sorted(UNSERVED)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the section into the file, in place of what is there."""
    text = TABLE.read_text(encoding="utf-8")
    before, after = text.partition(f"\n{zoo_conformance.HEADING}")[::2]
    before = before.partition(f"\n{HEADING}")[0].rstrip("\n")
    whole = f"{before}\n\n{section()}\n{zoo_conformance.HEADING}{after}"
    TABLE.write_text(whole, encoding="utf-8")
    sys.stdout.write(section_of(TABLE))


def section_of(table: Path) -> str:
    """Return the section as it is written."""
    after = table.read_text(encoding="utf-8").partition(f"\n{HEADING}")[2]
    return HEADING + after.partition(f"\n{zoo_conformance.HEADING}")[0]


if __name__ == "__main__":
    main()
