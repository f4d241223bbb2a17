"""What cannot be divided is refused by name, before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mlxd_shared
from mlxd_models.describe import describe
from mlxd_models.files.model_source import files_of
from mlxd_models.fit.described import facts_of
from mlxd_models.fit.shares import check_divides, rank_description
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_worker.process.options import parse_options
from tests.worker.kin import QWEN3, QWEN3_MOE, change, write_kin, write_quantised
from tests.worker.models.test_formats import fp8_folders

DEMO = describe(files_of(Path(mlxd_shared.__file__).parent / "demo_model"))


@pytest.mark.parametrize(
    ("ranks", "changes", "named"),
    [
        (8, {}, "num_key_value_heads"),
        (3, {}, "num_attention_heads"),
        (2, {"mlp": 701}, "intermediate_size"),
    ],
)
def test_sizes_that_ranks_do_not_divide(ranks: int, changes: dict[str, int], named: str) -> None:
    """The key of config.json is named."""
    described = replace(DEMO, config=replace(DEMO.config, **changes))
    with pytest.raises(InvalidModel, match=named):
        check_divides(described, LoadSpec(), ranks)


def test_another_kind_of_layers_is_refused() -> None:
    """Models that another module builds are not divided."""
    family = replace(DEMO.family, builder="mlxd_worker.models.families.latent_model")
    with pytest.raises(InvalidModel, match="LlamaForCausalLM"):
        check_divides(replace(DEMO, family=family), LoadSpec(), 2)


def test_widths_that_are_not_whole_groups_on_each_rank(tmp_path: Path) -> None:
    """Of packed weights, of squares, and of experts: the tensor and the numbers are named."""
    packed = write_quantised(tmp_path / "packed", change(QWEN3_MOE, moe_intermediate_size=96))
    with pytest.raises(InvalidModel, match=r"96 inputs over 2 .* not whole groups of 32") as caught:
        check_divides(describe(files_of(packed)), LoadSpec(), 2)
    assert caught.value.field == "model.layers.0.mlp.switch_mlp.down_proj.weight"
    squares, _ = fp8_folders(tmp_path, change(QWEN3, num_hidden_layers=1))
    with pytest.raises(InvalidModel, match=r"128 outputs over 2 .* not whole groups of 48"):
        check_divides(describe(files_of(squares)), LoadSpec(), 2)
    odd = write_kin(tmp_path / "odd", change(QWEN3_MOE, moe_intermediate_size=33))
    with pytest.raises(InvalidModel, match="33 outputs cannot be divided over 2") as caught:
        check_divides(describe(files_of(odd)), LoadSpec(), 2)
    assert caught.value.field == "model.layers.0.mlp.experts.0.gate_proj.weight"


def test_what_would_be_packed_in_groups_on_two_ranks(tmp_path: Path) -> None:
    """A form that is packed on loading is the option's fault; groups that are smaller are not."""
    folder = write_kin(tmp_path, change(QWEN3, intermediate_size=192))
    described = describe(files_of(folder))
    with pytest.raises(
        InvalidRequest, match=r"options.weights: q4: 192 inputs of .*down_proj.* groups of 64"
    ):
        check_divides(described, LoadSpec(weights=Weights.Q4), 2)
    check_divides(described, LoadSpec(weights=Weights.MXFP4), 2)


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
