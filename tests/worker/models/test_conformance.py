"""docs/models.md: what the conformance run wrote, of every architecture that there is."""

from __future__ import annotations

from mlxd_models.families.registry import REGISTRY
from mlxd_models.sizes.vlm_types import UNSERVED, VLM_TYPES
from mlxd_models.sizes.zoo_types import ZOO_TYPES
from tests.worker import vlm_conformance
from tests.worker.conformance import TABLE
from tests.worker.hybrid import TOLERANCE
from tests.worker.vlm import CASES
from tests.worker.zoo import REFUSED, UNTRIED
from tests.worker.zoo_conformance import section_of


def rows(text: str | None = None) -> list[list[str]]:
    """Return the cells of a table, of our own architectures' where nothing else is said."""
    own = TABLE.read_text(encoding="utf-8").partition(vlm_conformance.HEADING)[0]
    lines = (own if text is None else text).splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]


def test_the_table_has_every_architecture() -> None:
    """Each registered architecture has a row, and nothing else has."""
    assert [row[0].strip("`") for row in rows()] == sorted(REGISTRY)


def test_every_figure_is_within_the_bound() -> None:
    """As published and packed, no logit is further from mlx-lm's than 1e-3 of the largest."""
    for _, caches, packings, variants, plain, packed in rows():
        assert caches
        assert int(variants) > 0
        assert float(plain) < TOLERANCE
        assert (packings == "none") == (packed == "")
        assert not packed or float(packed) < TOLERANCE


def test_the_table_has_what_goes_through_mlx_lm() -> None:
    """Each of its types has a row: within the bound, refused by name, or told why it has none."""
    table_rows = rows(section_of(TABLE))

    assert [row[0].strip("`") for row in table_rows] == sorted(ZOO_TYPES)
    for name, caches, error in table_rows:
        refused = (REFUSED | UNTRIED).get(name.strip("`"))
        assert (error == "") == (refused is not None)
        assert refused is None or refused in caches
        assert not error or float(error) < TOLERANCE


def test_the_table_has_what_goes_through_mlx_vlm() -> None:
    """Each served type has a row within the bound, each other one a reason."""
    table_rows = rows(vlm_conformance.section_of(TABLE))

    served = [row for row in table_rows if len(row) == 5]
    assert [row[0].strip("`") for row in served] == sorted(VLM_TYPES)
    for name, caches, _, configurations, worst in served:
        assert caches
        assert int(configurations) == sum(case.kind == name.strip("`") for case in CASES)
        assert float(worst) < TOLERANCE
    left = [row for row in table_rows if len(row) == 2]
    assert [row[0].strip("`") for row in left] == sorted(UNSERVED)
