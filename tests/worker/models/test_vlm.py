"""Models through mlx-vlm: logits by our caches are its own, or it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.describe import describe
from mlxd_models.families.foreign import FOREIGN, INSTALLED
from mlxd_models.families.foreign_parts import check_installed
from mlxd_models.families.foreign_seeing import (
    FOREIGN_SEEING,
    MLX_VLM,
    parse_seeing,
    pass_values_of,
    seeing_anywhere,
)
from mlxd_models.files.image_settings import IMAGE_FILE, read_image_settings
from mlxd_models.sizes.vlm_types import UNSERVED, VLM_TYPES, VLM_VERSION
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_models.sizes.zoo_types import zoo_type
from mlxd_shared.config import IMAGE_PLACES_ADAPTED_MAX
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.cache.base import RowId
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.models.vlm.adapter import VlmModel, parse_vlm, patches_of
from tests.support.effort import IN_SOAK
from tests.support.shown import read, see_blank, shown_by
from tests.support.tiny_model import write_json
from tests.worker.fresh_process import environment, run
from tests.worker.hybrid import error
from tests.worker.kin import quantise
from tests.worker.tiny import caches_of, ignore_progress, load, write_model
from tests.worker.vlm import CASES, Case, stored_layouts, vlm_weights, worst_error
from tests.worker.vlm_configs import CONFIGS

PARITY = 1e-3
KINDS = tuple(case for case in CASES if case.name == "plain")
TRIED = CASES if IN_SOAK else (*KINDS, *CASES[1::9])


def test_seven_types_have_five_configurations_each() -> None:
    """All of them are tried in the soak, a part of them in every run."""
    assert {case.kind for case in CASES} == VLM_TYPES.keys() == CONFIGS.keys()
    assert len(CASES) == 35
    assert len({(case.kind, case.name) for case in CASES}) == 35


def test_a_tower_that_cannot_see_is_refused_at_its_load(tmp_path: Path) -> None:
    """Here its features are not as wide as the text: else the first picture would find out."""
    case = next(case for case in KINDS if case.kind == "qwen2_vl")
    tower = {**case.config["vision_config"], "hidden_size": 32}
    narrow = {**case.config, "vision_config": tower}
    folder = write_model(tmp_path / "m", narrow, stored_layouts(vlm_weights(narrow)))
    write_json(folder / IMAGE_FILE, case.settings)
    with pytest.raises(InvalidModel, match=r"blank image|features are 32 wide"):
        load(folder)


@pytest.mark.parametrize("case", TRIED, ids=lambda case: f"{case.kind}-{case.name}")
def test_logits_are_those_of_mlx_vlm(case: Case, tmp_path: Path) -> None:
    """Of a prompt with three images, in chunks that cut them, then decoded beside a text."""
    folder = case.write(tmp_path, lively=True)
    model = load(folder)
    assert isinstance(model, VlmModel)
    assert not model.apart
    assert worst_error(case, folder, model) <= PARITY


@pytest.mark.parametrize("case", [KINDS[0], KINDS[3], KINDS[6]], ids=lambda case: case.kind)
def test_each_part_of_an_image_decides(case: Case, tmp_path: Path) -> None:
    """Its rows and columns, for those that turn by axes; the order of patches; every pixel."""
    folder = case.write(tmp_path, lively=True)
    model = load(folder)
    assert isinstance(model, Sighted)
    shown, caches = shown_by(model, folder, case), caches_of(model)
    whole = read(model, caches, shown, [99])
    flat = read(model, caches, shown, [99], row=RowId(2), placed=False)
    assert error(flat, whole) > 10 * PARITY
    settings = read_image_settings(folder, side=case.side, places_max=99)
    pixels = mx.array(case.pixels()[0])[None]
    for other in (pixels[:, ::-1], pixels[:, :, ::-1], pixels[..., ::-1], pixels // 2):
        seen = model.see(other, settings)[0]
        assert error(seen, shown.features[0]) > 10 * PARITY


@pytest.mark.parametrize("case", [KINDS[1], KINDS[2]], ids=lambda case: case.kind)
def test_tokens_that_turn_by_one_number_ignore_axes(case: Case, tmp_path: Path) -> None:
    """A type whose text knows no axes reads its prompt by positions alone."""
    folder = case.write(tmp_path)
    model = load(folder)
    shown, caches = shown_by(model, folder, case), caches_of(model)
    whole = read(model, caches, shown, [99])
    flat = read(model, caches, shown, [99], row=RowId(2), placed=False)
    assert mx.array_equal(flat, whole)


def test_patches_of_a_place_lie_together() -> None:
    """Place by place, colours before frames; or row by row."""
    image = mx.arange(8 * 12 * 3).reshape(8, 12, 3)
    placed = patches_of(image, patch=2, merge=2, frames=3, in_rows=False).reshape(24, 3, 3, 2, 2)
    rows = patches_of(image, patch=2, merge=2, frames=1, in_rows=True)
    for number, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]):
        corner = image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].transpose(2, 0, 1)
        for frame in range(3):
            assert mx.array_equal(placed[number, :, frame], corner)
        assert mx.array_equal(rows[0, 6 * row + column], corner)


@pytest.mark.parametrize("keeps_packed", [True, False])
@pytest.mark.parametrize("kind", ["qwen2_vl", "glm4v_moe"])
def test_packed_weights_stay_so_or_become_numbers(
    kind: str, tmp_path: Path, *, keeps_packed: bool
) -> None:
    """Both lives give the same logits, and take the bytes that they were said to."""
    case = next(case for case in KINDS if case.kind == kind)
    folder = case.write(tmp_path)
    weights = stored_layouts(vlm_weights(case.config))
    text = {name: weights.pop(name) for name in list(weights) if name.startswith("language_model")}
    config, packed = quantise(case.config, text, whole=("gate.weight",))
    write_model(folder, config, weights | packed)
    files = inspect_model(folder)

    model = load_model(files, form=FloatType.F32, progress=ignore_progress, packed=keeps_packed)

    shown = shown_by(model, folder, case)
    logits = read(model, caches_of(model), shown, [11])
    other = load_model(files, form=FloatType.F32, progress=ignore_progress, packed=not keeps_packed)
    expected = read(other, caches_of(other), shown_by(other, folder, case), [99])
    assert error(logits, expected) <= PARITY
    named, arrays = {spec.name for spec in files.specs}, model.parameters()
    nbytes = sum(array.nbytes for name, array in arrays.items() if name in named)
    assert files.packed
    assert nbytes == (files.kept.nbytes(4) if keeps_packed else 4 * files.weight_values)


@pytest.mark.parametrize("case", KINDS[::2], ids=lambda case: case.kind)
def test_names_alone_describe_no_smaller_a_model(case: Case, tmp_path: Path) -> None:
    """Whoever has no mlx-vlm counts no fewer weights and bytes of caches, and the same sight."""
    folder = case.write(tmp_path)

    named, files = describe(folder, foreign=FOREIGN), inspect_model(folder)

    assert named.family is FOREIGN_SEEING
    assert describe(folder, foreign=INSTALLED).footprint == named.footprint
    assert named.weight_values >= files.weight_values
    assert named.footprint.sight == files.footprint.sight
    assert named.footprint.sight is not None
    assert named.footprint.sight.places_max == IMAGE_PLACES_ADAPTED_MAX
    assert named.footprint.context_max == files.footprint.context_max
    more, exact = named.footprint.caches, files.footprint.caches
    assert more.foreign
    assert more.kv_values_per_token >= exact.kv_values_per_token
    passes = files.footprint.passes
    assert (named.footprint.passes.hidden, named.footprint.passes.vocab) == (
        passes.hidden,
        passes.vocab,
    )


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "code": ({"model_file": "mine.py"}, "model_file"),
    "no place": ({"image_token_id": None}, "image_token_id"),
    "a place beyond": ({"image_token_id": 96}, "image_token_id"),
    "no patch": ({"vision_config": {"spatial_merge_size": 2}}, "vision_config.patch_size"),
    "no merge": ({"vision_config": {"patch_size": 4}}, "vision_config.spatial_merge_size"),
    "no heads": (
        {"vision_config": {"patch_size": 4, "spatial_merge_size": 2, "hidden_size": 8}},
        "vision_config.num_attention_heads",
    ),
    "colours": (
        {"vision_config": {"patch_size": 4, "spatial_merge_size": 2, "in_channels": 4}},
        "vision_config.in_channels",
    ),
    "a width of the text": ({"hidden_size": "x"}, "hidden_size"),
    "a vocabulary": ({"vocab_size": 0}, "vocab_size"),
    "a text": ({"text_config": [1]}, "text_config"),
    "a ratio": (
        {"vision_config": {**CONFIGS["qwen2_vl"]["vision_config"], "mlp_ratio": 65}},
        "vision_config.mlp_ratio",
    ),
    "layers": (
        {"vision_config": {**CONFIGS["qwen2_vl"]["vision_config"], "num_layers": 10**9}},
        "vision_config.num_layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_served_is_refused_by_key(name: str) -> None:
    """Whoever plans says it as whoever loads does."""
    changes, field = REFUSED[name]
    with pytest.raises(InvalidModel) as caught:
        parse_seeing(CONFIGS["qwen2_vl"] | changes)
    assert (caught.value.file, caught.value.field) == ("config.json", field)


def test_what_mlx_vlm_refuses_is_refused_in_its_words() -> None:
    """Before a weight is read; with the type."""
    config = {**CONFIGS["qwen2_vl"], "rope_scaling": {"type": "yarn", "mrope_section": [4, 2, 2]}}
    with pytest.raises(
        InvalidModel, match=r"mlx-vlm's qwen2_vl refuses this config: .*rope_scaling"
    ):
        parse_vlm(config)
    with pytest.raises(InvalidModel, match="mlx-vlm's qwen2_vl cannot be run here"):
        parse_vlm({**CONFIGS["qwen2_vl"], "num_key_value_heads": 3})


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_what_is_not_served_is_refused_by_name_or_reads_text(name: str) -> None:
    """With what is in the way; where mlx-lm has its text, that is served as it was."""
    config = {**CONFIGS["qwen2_vl"], "model_type": name, "architectures": ["Theirs"]}
    family = seeing_anywhere(config)
    if zoo_type(config) is not None:
        assert family is None
        return
    assert family is FOREIGN_SEEING
    with pytest.raises(InvalidModel, match=f"mlx-vlm's {name} is not served: it ") as caught:
        family.parse(config)
    assert caught.value.field == "model_type"


def test_a_text_without_a_tower_is_mlx_lms() -> None:
    """Nothing sees without a `vision_config`."""
    config = {key: value for key, value in CONFIGS["qwen2_vl"].items() if key != "vision_config"}
    assert seeing_anywhere(config) is None
    with pytest.raises(InvalidModel, match="is not one of mlx-vlm's"):
        parse_seeing(config)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (None, "which is not installed: install mlxd.vlm."),
        ("0.1.0", f"{VLM_VERSION} alone, 0.1.0 "),
    ],
)
def test_another_version_is_refused_by_name(installed: str | None, words: str) -> None:
    """With what to install."""
    with pytest.raises(InvalidModel, match=words):
        check_installed(MLX_VLM, "glm4v", installed)
    check_installed(MLX_VLM, "glm4v", VLM_VERSION)


@pytest.mark.parametrize("case", KINDS[::2], ids=lambda case: case.kind)
def test_seeing_takes_no_more_than_the_fit_reckons(case: Case, tmp_path: Path) -> None:
    """Of an image of 256 places, the largest moment of a tower of nine layers."""
    deep = {"depth": 9, "num_hidden_layers": 9}
    case = replace(
        case, vision={key: deep[key] for key in case.config["vision_config"] if key in deep}
    )
    folder = case.write(tmp_path)
    model = load(folder)
    settings = read_image_settings(folder, side=case.side, places_max=IMAGE_PLACES_ADAPTED_MAX)
    features, taken_nbytes = see_blank(model, settings, (1, 16 * case.side, 16 * case.side))
    said_nbytes = 4 * pass_values_of(case.config, 256, on_cpu=runs_cpu())
    assert features.shape[:2] == (1, 256)
    assert said_nbytes / (2 if runs_cpu() else 3) < taken_nbytes <= said_nbytes


def test_of_mlx_vlm_models_alone_are_imported() -> None:
    """Not its programs, which need packages that set-up leaves out, nor what decodes files."""
    code = """
import json, sys
from mlxd_worker.models.vlm.peer import vlm_module
for name in ("qwen2_vl", "dots_ocr", "mage_vl", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"):
    vlm_module(name, within=name)
parts = [name.split(".") for name in sys.modules if name.startswith("mlx_vlm")]
programs = sorted(".".join(part) for part in parts if len(part) > 1 and part[1] != "models")
others = [name for name in ("cv2", "datasets", "torch") if name in sys.modules]
print(json.dumps([programs, others]))
"""
    assert run(code, environment()) == [["mlx_vlm.turboquant"], []]
