"""What cannot be divided is refused by name, before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mlxd_shared
from mlxd_models.describe import describe
from mlxd_models.families.common.experts import ExpertsConfig
from mlxd_models.files.model_source import files_of
from mlxd_models.fit.described import facts_of
from mlxd_models.fit.shares import check_divides, rank_description
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_worker.process.options import parse_options

DEMO = describe(files_of(Path(mlxd_shared.__file__).parent / "demo_model"))


@pytest.mark.parametrize(
    ("ranks", "changes", "named"),
    [
        (8, {}, "num_key_value_heads"),
        (3, {}, "num_attention_heads"),
        (2, {"mlp": 701}, "intermediate_size"),
        (2, {"experts": object.__new__(ExpertsConfig)}, "experts"),
    ],
)
def test_sizes_that_ranks_do_not_divide(ranks: int, changes: dict[str, int], named: str) -> None:
    """The key of config.json, or the kind of layer, is named."""
    described = replace(DEMO, config=replace(DEMO.config, **changes))
    with pytest.raises(InvalidModel, match=named):
        check_divides(described, LoadSpec(), ranks)


def test_another_kind_of_layers_is_refused() -> None:
    """Models that another module builds are not divided."""
    family = replace(DEMO.family, builder="mlxd_worker.models.families.latent_model")
    with pytest.raises(InvalidModel, match="LlamaForCausalLM"):
        check_divides(replace(DEMO, family=family), LoadSpec(), 2)


def test_packed_weights_are_refused() -> None:
    """A form that is packed on loading is the option's fault."""
    with pytest.raises(InvalidRequest, match="q4"):
        check_divides(DEMO, LoadSpec(weights=Weights.Q4), 2)


@pytest.mark.parametrize("ranks", [0, config.RANKS_MAX + 1])
def test_ranks_are_bounded(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line knows the limit."""
    with pytest.raises(SystemExit):
        parse_options(["--ranks", str(ranks)])
    assert f"{ranks} is outside 1 to {config.RANKS_MAX}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prefix-disk", "--findings"])
def test_what_ranks_cannot_honour_is_refused_beside_them(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks on disk are one rank's alone; so would be the paths that findings switch off."""
    parse_options([option, str(tmp_path)])
    with pytest.raises(SystemExit):
        parse_options(["--ranks", "2", option, str(tmp_path)])
    assert f"argument {option}: not with --ranks" in capsys.readouterr().err


def test_a_rank_is_planned_with_its_part() -> None:
    """The fit counts half of what is divided, and all of the embedding."""
    whole, part = facts_of(DEMO), facts_of(rank_description(DEMO, 2))
    embedding = DEMO.config.vocab * DEMO.config.hidden
    norms = (2 * DEMO.config.layers + 1) * DEMO.config.hidden
    assert part.elements - embedding - norms == (whole.elements - embedding - norms) // 2
    assert part.caches.kv_values_per_token * 2 == whole.caches.kv_values_per_token
    assert part.stored_bytes < whole.stored_bytes
