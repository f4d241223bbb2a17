"""LLaVA against transformers' own, whose logits are in tests/data, and against itself in pieces."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Sighted
from mlxd_worker.models.loader import inspect_model
from tests.support.golden_logits import COLUMNS, read_golden
from tests.support.llava_cases import CASES, GOLDEN, Case
from tests.support.shown import logits_in_pieces, read_whole, see_blank, squares_shown_by
from tests.worker.tiny import caches_of, difference, load


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Of every tower, text, strategy and layer, with two images and text between: within 1e-3."""
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = squares_shown_by(model, folder, case)
    assert [seen.shape for seen in shown.features] == [(case.tokens, 32)] * 2
    logits = read_whole(model, shown)
    expected = mx.array(read_golden(GOLDEN)[case.name])
    assert difference(expected, mx.zeros(expected.shape)) > 1
    assert difference(logits[:, mx.array(COLUMNS)], expected) < 1e-3


@pytest.mark.parametrize("width", [1, 4, 7, 11])
def test_a_chunk_may_end_within_an_image(width: int, tmp_path: Path) -> None:
    """Chunks of any width give the logits of one pass."""
    case = CASES[0]
    folder = case.write(tmp_path / "model")
    model = load(folder)
    shown = squares_shown_by(model, folder, case)
    caches = caches_of(model)
    whole = logits_in_pieces(model, caches, shown, [len(case.prompt)])
    assert difference(logits_in_pieces(model, caches, shown, [width]), whole) < 1e-4


WIDEST: dict[str, dict[str, int]] = {
    "scores in parts": {"image_size": 256, "intermediate_size": 20},
    "the feed-forward": {"image_size": 128, "intermediate_size": 2048},
    "pixels": {"image_size": 512, "patch_size": 32, "intermediate_size": 20},
}


@pytest.mark.skipif(not runs_cpu(), reason="elsewhere images are seen together")
@pytest.mark.parametrize("form", [FloatType.F32, FloatType.BF16])
@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize("widest", WIDEST)
def test_one_image_takes_what_the_fit_reckons(
    widest: str, tower: str, form: FloatType, tmp_path: Path
) -> None:
    """Whatever the widest part of a tower is, in float32 and as stored in 16 bits."""
    case = Case("memory", tower=tower, vision=WIDEST[widest])
    folder = case.write(tmp_path / "model")
    sight = inspect_model(folder).footprint.sight
    assert sight is not None
    settings = read_image_settings(folder, side=case.side)
    _, taken_nbytes = see_blank(load(folder, form), settings, (1, case.side, case.side))
    said_nbytes = sight.seeing_nbytes(form.nbytes, on_cpu=True)
    assert 0.9 * said_nbytes < taken_nbytes <= said_nbytes


def test_images_of_a_batch_do_not_mix(tmp_path: Path) -> None:
    """An image has the same features alone and beside others."""
    case = CASES[0]
    folder = case.write(tmp_path / "model")
    model = load(folder)
    assert isinstance(model, Sighted)
    settings, pixels = read_image_settings(folder, side=case.side), mx.array(case.pixels())
    together = model.see(pixels, settings)
    apart = mx.concatenate([model.see(pixels[at : at + 1], settings) for at in range(2)])
    assert difference(together, apart) < 1e-4
    assert difference(together[0], together[1]) > 0.1
