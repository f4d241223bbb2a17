"""Qwen3-VL and Qwen3.5's vision against transformers' own, and themselves in pieces."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copy

import mlx.core as mx
import pytest

from mlxd_models.describe import describe
from mlxd_models.families.registry import REGISTRY
from mlxd_models.files.image_settings import IMAGE_FILE, read_image_settings
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.config import IMAGE_PLACES_MAX
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Model, Sighted
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.qwen3_vl_cases import CASES, DENSE, GOLDEN, HYBRID, SPARSE, StackedCase
from tests.support.qwen_vl_cases import GRIDS, PIECES, PLACE
from tests.support.shown import (
    Shown,
    decode_together,
    logits_in_pieces,
    read_together,
    read_whole,
    see_blank,
    shown_by,
)
from tests.worker.tiny import caches_of, difference, load, stored_in, write_model

BY_NAME = {case.name: case for case in CASES}
TEXT = (9, 8, 7, 100, 101, 55, 3, 2, 80)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: StackedCase, tmp_path: Path) -> None:
    """Of deep levels, tables, merges, frames, sections, experts and recurrent layers, with three
    images of other shapes and text between: within 1e-3; in chunks that cut images, likewise."""
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = shown_by(model, folder, case)
    levels = len(case.config["vision_config"]["deepstack_visual_indexes"])
    assert [seen.shape for seen in shown.features] == [
        (rows * columns, 32 * (1 + levels)) for rows, columns in GRIDS
    ]
    expected = mx.array(read_golden(GOLDEN)[case.name])
    assert difference(expected, mx.zeros(expected.shape)) > 1
    caches = caches_of(model)
    for widths in ([len(case.prompt)], [3, 11, 1]):
        logits = logits_in_pieces(model, caches, shown, widths)
        assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and three prompts: with images, with one, and of text alone."""

    model: Model
    prompts: tuple[Shown, ...]


@pytest.fixture(scope="module", params=["deep", "experts", "hybrid"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model of each kind."""
    case = BY_NAME[request.param]
    folder = case.write(tmp_path_factory.mktemp("model"))
    model = load(folder)
    shown = shown_by(model, folder, case)
    image = shown.images[0]
    shorter = Shown((*PIECES[0], *[PLACE] * image.tokens, 33), (image,), shown.features[:1])
    return Loaded(model, (shown, Shown(TEXT), shorter))


def test_a_chunk_may_end_anywhere(loaded: Loaded) -> None:
    """Within a row of places, between rows, images and texts: the logits are those of one pass."""
    model, shown = loaded.model, loaded.prompts[0]
    caches = caches_of(model)
    whole = logits_in_pieces(model, caches, shown, [len(shown.prompt)])
    for widths in ([1], [4], [16]):
        assert difference(logits_in_pieces(model, caches, shown, widths), whole) < 2e-4


def test_rows_decode_together_each_at_its_own_places(loaded: Loaded) -> None:
    """Behind images and without any, in one batch: each row's logits are those of one pass."""
    model, prompts, more = loaded.model, loaded.prompts, (44, 13, 75, 211)
    for shown, logits in zip(prompts, decode_together(model, prompts, more, width=99), strict=True):
        longer = replace(shown, prompt=(*shown.prompt, *more))
        assert difference(logits, read_whole(model, longer)[len(shown.prompt) :]) < 2e-4


def test_several_prompts_share_a_pass(loaded: Loaded) -> None:
    """Chunks of rows with images and without, one after another: each row's logits are its own.
    Recurrent layers read prompts one by one."""
    model, prompts = loaded.model, loaded.prompts
    if not model.capabilities.reads_chunks:
        assert any(geometry is None for geometry in model.attention)
        return
    for shown, logits in zip(prompts, read_together(model, prompts), strict=True):
        assert difference(logits, read_whole(model, shown)) < 2e-4


def test_experts_are_read_as_published(tmp_path: Path) -> None:
    """In one tensor input by input, under the names of the published files: the same logits."""
    case = BY_NAME["experts"]
    folder = case.write(tmp_path / "made")
    tensors = stored_in(folder)
    published: dict[str, mx.array] = {}
    for name, values in tensors.items():
        layer, stack, linear = name.partition(".mlp.switch_mlp.")
        outer = name.replace("vision_tower.", "model.visual.")
        if name.startswith("model."):
            outer = f"model.language_model.{name.removeprefix('model.')}"
        if not stack:
            published[outer] = values
            continue
        layer = outer.partition(".mlp.")[0]
        if linear == "down_proj.weight":
            published[f"{layer}.mlp.experts.down_proj"] = values.swapaxes(1, 2)
        elif linear == "gate_proj.weight":
            both = mx.concatenate([values, tensors[name.replace("gate_proj", "up_proj")]], axis=1)
            published[f"{layer}.mlp.experts.gate_up_proj"] = both.swapaxes(1, 2)
    published = {name: mx.contiguous(values) for name, values in published.items()}
    other = write_model(tmp_path / "published", case.config, published)
    copy(folder / IMAGE_FILE, other)
    models = (load(folder), load(other))
    logits = [read_whole(model, shown_by(model, folder, case)) for model in models]
    assert difference(*logits) < 1e-5


@pytest.mark.parametrize("name", ["deep", "experts", "hybrid", "hybrid-experts"])
def test_without_a_tower_it_is_its_text(name: str, tmp_path: Path) -> None:
    """As mlx-lm's converter leaves it: it reads text alone, and says the same of it."""
    case = BY_NAME[name]
    seeing = load(folder := case.write(tmp_path / "seeing"))
    texts = {
        f"language_model.{name}": values
        for name, values in stored_in(folder).items()
        if not name.startswith("vision_tower.")
    }
    other = write_model(tmp_path / "blind", case.config, texts)
    assert describe(folder).footprint.sight is not None
    assert describe(other).footprint.sight is None
    blind = load(other)
    assert not isinstance(blind, Sighted)
    both = [read_whole(model, Shown(TEXT)) for model in (seeing, blind)]
    assert difference(*both) < 1e-5


@pytest.mark.parametrize(
    "missing", ["vision_tower.merger.norm.bias", "vision_tower.pos_embed.weight"]
)
def test_a_tower_is_whole_or_not_there(missing: str, tmp_path: Path) -> None:
    """One tensor too few is an error that names it, no text alone."""
    folder = BY_NAME["deep"].write(tmp_path / "model")
    tensors = {name: values for name, values in stored_in(folder).items() if name != missing}
    write_model(folder, BY_NAME["deep"].config, tensors)
    with pytest.raises(Exception, match=missing):
        describe(folder)


@pytest.mark.parametrize("form", [FloatType.F32, FloatType.BF16])
@pytest.mark.parametrize("mlp", [20, 200])
@pytest.mark.parametrize("grid", [(24, 24), (4, 144)])
def test_a_pass_takes_no_more_than_the_fit_reckons(
    grid: tuple[int, int], mlp: int, form: FloatType, tmp_path: Path
) -> None:
    """Of an image of 576 places, square or long, the largest moment of a tower that evaluates it;
    by the layers' widest part, of attention or feed-forward, in float32 and as stored in 16 bits.
    """
    case = StackedCase("memory", vision={"intermediate_size": mlp, "num_position_embeddings": 256})
    folder = case.write(tmp_path / "model")
    model, family = load(folder, form), REGISTRY[DENSE]
    settings = read_image_settings(folder, side=case.side, places_max=IMAGE_PLACES_MAX)
    height, width = (count * case.side for count in grid)
    features, taken_nbytes = see_blank(model, settings, (1, height, width))
    assert features.shape == (1, math.prod(grid), 32 * 3)
    config, places = family.parse(case.config), math.prod(grid)
    tower, sight = config.tower, family.footprint(config).sight
    assert sight is not None
    sizes = replace(
        sight,
        pass_values=tower.pass_values_of(places),
        settled_values=tower.settled_values_of(places),
        float_values=tower.float_values_of(places),
    )
    said_nbytes = sizes.seeing_nbytes(form.nbytes, on_cpu=runs_cpu())
    assert taken_nbytes <= said_nbytes
    assert taken_nbytes > said_nbytes / (1.25 if runs_cpu() else 4), "far more than is needed"


def test_features_of_all_levels_are_counted() -> None:
    """What is kept of images is as many times as large as there are levels and one."""
    plain = SightSizes(token_id=5, tokens=8, side=4, hidden=32, pass_values=1, varies=True)
    deep = replace(plain, levels=3)
    assert deep.kept_nbytes(2) == 4 * plain.kept_nbytes(2)
    for name, levels in (("deep", 2), ("deep-in-all", 3), ("hybrid", 0)):
        case = BY_NAME[name]
        family = REGISTRY[case.architecture]
        sight = family.footprint(family.parse(case.config)).sight
        assert sight is not None
        assert sight.levels == levels


def test_kinds_have_cases() -> None:
    """Each architecture of the file of logits, and as many cases as it has."""
    assert {DENSE, SPARSE, HYBRID} < {case.architecture for case in CASES}
    assert set(json.loads(GOLDEN.read_text(encoding="utf-8"))) == set(BY_NAME)
