"""docs/models.md: what the conformance run wrote, of every architecture that there is."""

from __future__ import annotations

from mlxd_worker.models.registry import REGISTRY
from tests.worker.conformance import TABLE
from tests.worker.hybrid import TOLERANCE


def rows() -> list[list[str]]:
    """Return the table's cells."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]


def test_the_table_has_every_architecture() -> None:
    """Each registered architecture has a row, and nothing else has."""
    assert [row[0].strip("`") for row in rows()] == sorted(REGISTRY.entries)


def test_every_figure_is_within_the_bound() -> None:
    """As published and packed, no logit is further from mlx-lm's than 1e-3 of the largest."""
    for _, caches, packings, variants, plain, packed in rows():
        assert caches
        assert int(variants) > 0
        assert float(plain) < TOLERANCE
        assert (packings == "none") == (packed == "")
        assert not packed or float(packed) < TOLERANCE
